"""`webhookd jobs`."""
