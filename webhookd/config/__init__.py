"""Settings: what there is to set, where it comes from, and what is wrong with it."""
