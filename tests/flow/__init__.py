"""The real daemon: a process, a PostgreSQL, an HTTPS endpoint."""
