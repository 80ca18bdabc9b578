"""Wires everything together, keeps it running, and ends it in order."""
