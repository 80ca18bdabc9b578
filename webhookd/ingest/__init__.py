"""Events in, in groups that share a commit."""
