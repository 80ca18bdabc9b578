"""The commands for deliveries: publish, subscriptions, deliveries, dead-letters."""
