"""The HTTP API of the job queue."""
