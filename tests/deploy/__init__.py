"""Tests of deploy/: units, alerts, dashboard and runbook say what the daemon does."""
