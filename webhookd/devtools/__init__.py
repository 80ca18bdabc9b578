"""Tools for development and evaluation: listen, demo and bench."""
