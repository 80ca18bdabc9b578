"""The measures: each returns the numbers of one round. tests/bench/rows.py explains the numbers."""
