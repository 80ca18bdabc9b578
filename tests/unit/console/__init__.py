"""Tests of the console without a database: sessions, what pages show, charts."""
