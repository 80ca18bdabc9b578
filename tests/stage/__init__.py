"""Stages by themselves, on a real database: interleavings that a whole daemon seldom shows."""
