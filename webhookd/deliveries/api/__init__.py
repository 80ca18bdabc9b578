"""The HTTP resources of deliveries: events, subscriptions, deliveries, dead letters."""
