"""The upkeep of the job substrate: jobs out of events, and what time does to jobs."""
