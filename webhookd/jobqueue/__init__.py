"""The job queue (DP2): jobs for executors outside webhookd. Independent of deliveries."""
