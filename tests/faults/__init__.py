"""The fault suite: breaks every part under load and checks that no acknowledged event is lost."""
