"""Measurements: numbers to report, nothing to pass or fail."""
