"""The commands of deliveries: publish, subscriptions, deliveries, dead-letters."""
