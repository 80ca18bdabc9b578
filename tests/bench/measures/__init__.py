"""One module for each measure: a round in, its numbers out. tests/bench/rows.py says what they mean."""
