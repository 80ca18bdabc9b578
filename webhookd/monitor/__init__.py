"""How much waits, for whom, and since when."""
