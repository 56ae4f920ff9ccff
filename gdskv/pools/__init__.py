"""Where bytes live: the memory and the files of the tiers, cut into equal slots. They know no keys and no policy."""
