"""Retention and erasure: removes old finished rows, and everything of a tenant or a subscription."""
