"""The fault suite: everything is broken under load, and nothing acknowledged may be lost."""
