"""Tests of the way out: rules, signatures and the guarded client against a real endpoint."""
