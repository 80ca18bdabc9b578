"""A host whose clock is wrong, for a daemon in its own process."""
