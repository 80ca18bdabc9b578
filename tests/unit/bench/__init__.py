"""Tests of what a run of `make bench` makes of its numbers."""
