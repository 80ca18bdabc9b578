"""Gives a daemon process a wrong clock."""
