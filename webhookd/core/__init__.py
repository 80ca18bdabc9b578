"""Shared foundations: errors, states, limits, settings, logging, metrics. Imports nothing else of ours."""
