"""Shared foundations: errors, states, limits, settings, metrics. Imports nothing else of ours."""
