"""webhookd: takes events and delivers them as signed HTTPS webhooks, durably, with PostgreSQL alone."""

__version__ = "0.1.0"
