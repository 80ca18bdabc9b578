"""Tests which need no database."""
