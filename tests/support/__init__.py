"""Helpers of the tests: servers, databases, daemons, endpoints, load and checks."""
