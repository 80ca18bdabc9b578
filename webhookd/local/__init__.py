"""What runs on a developer's machine alone: an authority that is good for nothing else, and a receiver."""
