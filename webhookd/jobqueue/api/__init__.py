"""The HTTP resources of the job queue."""
