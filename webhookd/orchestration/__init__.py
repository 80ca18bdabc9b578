"""Sagas to jobs, and results to sagas: the only stage that changes a saga."""
