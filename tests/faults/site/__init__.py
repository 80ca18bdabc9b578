"""A folder for a daemon's PYTHONPATH: Python runs its sitecustomize before the daemon."""
