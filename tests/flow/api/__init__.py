"""Tests of the HTTP API of a real daemon: responses, scopes, errors and malformed requests."""
