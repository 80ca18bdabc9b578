"""A PostgreSQL of our own, from a wheel, for whoever has none: its programs, its folder, its life."""
