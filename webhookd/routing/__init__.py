"""Events to sagas."""
