"""Webhook deliveries, from the published event to the delivered request or the dead letter."""
