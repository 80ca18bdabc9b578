"""The tests of webhookd, and the bed on which they run."""
