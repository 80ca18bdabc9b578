"""A folder for a daemon's PYTHONPATH: Python runs the sitecustomize in it before the daemon."""
