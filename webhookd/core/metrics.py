"""Counters and gauges for Prometheus, in a registry of the daemon's own. Nothing here asks the database."""

import math
from collections.abc import Callable, Iterable, Mapping

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    ProcessCollector,
    disable_created_metrics,
)
from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from webhookd import __version__
from webhookd.core.states import AttemptStatus, ReportVerdict, SagaStatus

# A series more for each counter, and nobody asks when it was made.
disable_created_metrics()  # type: ignore[no-untyped-call]

# From a local endpoint's millisecond to the longest timeout that is usual.
DURATIONS_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 15, 30)

# The figures of fn_job_queue_health, of the whole cluster; its bound is said here too.
JOB_QUEUE = {
    "job_queue_enabled": "1 while the job substrate is on",
    "job_queue_backlog": "Jobs that are queued, up to 10,000",
    "job_queue_in_progress": "Jobs that an executor holds, up to 10,000",
    "job_queue_lease_active": "Of them, those whose lease has not run out, up to 10,000",
    "job_queue_dead_letter_open": "Jobs given up, that nobody has cancelled or requeued, up to 10,000",
    "job_queue_scheduled": "Of the queued, those for a later time, up to 10,000",
    "job_queue_retry_waiting": "Failed jobs that wait for their next attempt, up to 10,000",
    "job_queue_events_waiting": "Events whose jobs are still to be made, up to 10,000",
    "job_queue_oldest_queued_age_seconds": "For how long the oldest job could have been claimed",
}


class Metrics:
    """Everything that is counted. Names say what, and the unit last."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        Info("webhookd_build", "This instance's version", registry=self.registry).info(
            {"version": __version__}
        )
        self.events_accepted = self._counter("events_accepted", "Events stored through this instance's API")
        self.events_routed = self._counter("events_routed", "Events taken from the routing queue")
        self.sagas_routed = self._counter("sagas_routed", "Deliveries made by routing")
        self.attempts_started = self._counter("attempts_started", "Attempts created for due deliveries")
        self.transitions = self._counter("saga_transitions", "Deliveries moved, by where to", "status")
        self.results_refused = self._counter("results_refused", "Results that could not be applied")
        self.attempts = self._counter("delivery_attempts", "Requests, by how they ended", "outcome")
        self.reports = self._counter("delivery_reports", "Reports, by the database's verdict", "verdict")
        self.leases_released = self._counter("leases_released", "Leases handed back unsent")
        self.lease_resets = self._counter("lease_resets", "Lost leases, by what became of the job", "status")
        self.job_queue_spawned = self._counter("job_queue_spawned", "Jobs made of events")
        self.job_queue_reaped = self._counter(
            "job_queue_reaped", "Jobs moved by their time, by what became of them", "outcome"
        )
        self.job_queue_cleaned = self._counter("job_queue_cleaned", "Jobs past their retention")
        self.service_restarts = self._counter("service_restarts", "Restarts of a service", "service")
        self.reloads = self._counter("config_reloads", "Reloads, by outcome", "outcome")
        self.api_responses = self._counter(
            "api_responses", "The API's answers, by route and class of status", "route", "status"
        )
        self.in_flight = self._gauge("deliveries_in_flight", "Requests under way")
        self.in_flight_limit = self._gauge("deliveries_in_flight_limit", "How many may be")
        self.job_claims_waiting = self._gauge("job_claims_waiting", "Executors that wait here for a job")
        self.service_up = self._gauge("service_up", "1 while a service runs", "service")
        self.database_up = self._gauge("database_up", "1 while the database answers")
        self.reload_succeeded = self._gauge("config_last_reload_successful", "1 if the last reload worked")
        self.reload_succeeded.set(1)
        self.reloaded_at = self._gauge(
            "config_last_reload_timestamp_seconds", "When the configuration was last read, well or not"
        )
        self.restart_needed = self._gauge(
            "config_restart_needed", "Settings that were changed and wait for a restart"
        )
        self.backlog = self._gauge("backlog", "What waits in the whole cluster, up to 10,000", "stage")
        self.backlog_age = self._gauge(
            "backlog_oldest_age_seconds", "For how long the oldest of it could have been taken", "stage"
        )
        self.job_queue = {name: self._gauge(name, help_text) for name, help_text in JOB_QUEUE.items()}
        self._forget_job_queue()
        self.duration = Histogram(
            "webhookd_delivery_duration_seconds",
            "How long requests took",
            buckets=DURATIONS_SECONDS,
            registry=self.registry,
        )

        # From the first scrape on: a rate cannot see a series' first sample.
        for reached in (SagaStatus.COMPLETED, SagaStatus.PENDING_RETRY, SagaStatus.DEAD_LETTERED):
            self.transitions.labels(reached.value)
        for verdict in ReportVerdict:
            self.reports.labels(verdict.value)
        for reset in (AttemptStatus.PENDING, AttemptStatus.FAILED):
            self.lease_resets.labels(reset.value)
        for become in ("recovered", "retry_waiting", "dead_lettered", "promoted", "came_due", "cancelled"):
            self.job_queue_reaped.labels(become)
        self.reports.labels("unstorable")
        self.attempts.labels("delivered")
        for outcome in ("done", "refused"):
            self.reloads.labels(outcome)

    def forget_backlog(self) -> None:
        """What waits is not known."""
        self.backlog.clear()
        self.backlog_age.clear()
        self._forget_job_queue()

    def _forget_job_queue(self) -> None:
        for gauge in self.job_queue.values():
            gauge.set(math.nan)  # it has no labels to take away

    def see_job_queue(self, figures: Mapping[str, float | None]) -> None:
        """How the job substrate is, by the names of JOB_QUEUE."""
        for name, gauge in self.job_queue.items():
            gauge.set(figures[name] or 0.0)

    def follow(self, name: str, help_text: str, count: Callable[[], float]) -> None:
        """Show as a counter what somebody else counts."""
        self.registry.register(_Followed(f"webhookd_{name}", help_text, count))

    def _counter(self, name: str, help_text: str, *labels: str) -> Counter:
        return Counter(f"webhookd_{name}", help_text, labels, registry=self.registry)

    def _gauge(self, name: str, help_text: str, *labels: str) -> Gauge:
        return Gauge(f"webhookd_{name}", help_text, labels, registry=self.registry)


class _Followed(Collector):
    def __init__(self, name: str, help_text: str, count: Callable[[], float]) -> None:
        self._name = name
        self._help_text = help_text
        self._count = count

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(self._name, self._help_text, value=self._count())
