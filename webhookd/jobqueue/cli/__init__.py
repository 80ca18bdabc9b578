"""The commands of the job queue: webhookd jobs."""
