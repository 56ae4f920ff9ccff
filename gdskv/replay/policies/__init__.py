"""The comparison room: reference policies and Belady's bound, beside the product's own. Not part of serving."""
