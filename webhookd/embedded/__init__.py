"""The embedded PostgreSQL, from a wheel: its programs, its data folder, and starting and stopping it."""
