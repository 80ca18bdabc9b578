"""The HTTP API of a real daemon: what each route answers, to whom, and what it says to nonsense."""
