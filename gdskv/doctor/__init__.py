"""What a node can do for gdskv, and why not more: facts from its system files, and a trial of each directory."""
