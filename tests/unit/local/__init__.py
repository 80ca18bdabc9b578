"""Tests of what runs on a developer's machine alone."""
