"""SIGHUP: what a reload swaps, what it leaves for the next start, and what it refuses."""
