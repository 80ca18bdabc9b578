"""Tests of deploy/: units, images, alerts, dashboard and runbook match the daemon."""
