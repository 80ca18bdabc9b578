"""Benchmarks: numbers to report, nothing to pass or fail. `make bench` runs `python -m tests.bench`."""
