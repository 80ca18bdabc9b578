"""Tests of the command line's pure parts."""
