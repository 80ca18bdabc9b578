"""Leases whose time is over."""
