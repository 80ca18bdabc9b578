"""The database by itself: what its tables, functions and roles allow and refuse."""
