"""The job queue (DP2): jobs for executors outside webhookd. Does not depend on deliveries."""
