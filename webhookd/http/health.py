"""/healthz, /readyz, /status and /metrics, with their response types. None of them uses the database."""

from collections.abc import Callable
from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

from aiohttp import web
from msgspec import Meta
from prometheus_client import CollectorRegistry, generate_latest

from webhookd.http import responses
from webhookd.http.fields import Attempts, Count, Days, Delay, ErrorCode, Id, Jitter, Time
from webhookd.http.responses import HEADERS, json_response
from webhookd.http.routes import OtherResponse, Resource, route


class Alive(TypedDict):
    """The process answers."""

    alive: bool


class Readiness(TypedDict):
    """Whether this instance is ready for work."""

    ready: bool
    because: NotRequired[Annotated[list[str], Meta(examples=[[]], description="why it is not ready")]]


class DatabaseStatus(TypedDict):
    """Whether the database answers."""

    available: bool


class ServiceStatus(TypedDict):
    """A service that this instance runs."""

    name: Annotated[str, Meta(examples=["delivery"])]
    state: Literal["running", "failing", "ended"]
    restarts: Annotated[int, Meta(ge=0, examples=[0])]
    last_error: Annotated[str | None, Meta(examples=[None])]


class StageBacklog(TypedDict):
    """The work that waits for one stage."""

    stage: Annotated[str, Meta(examples=["routing"])]
    waiting: Count
    oldest_at: Time | None


CountedUpTo: TypeAlias = Annotated[
    int, Meta(ge=1, examples=[10_000], description="counting stops at this number")
]


class BacklogStatus(TypedDict):
    """Waiting work, as of `seen_at`."""

    seen_at: Time
    counted_up_to: CountedUpTo
    stages: list[StageBacklog]


class FailingEndpointStatus(TypedDict):
    """A failing endpoint. It gets one request at a time until a request succeeds."""

    subscription_id: Id
    callback_url: Annotated[str, Meta(examples=["https://receiver.example/hook"])]
    description: Annotated[str | None, Meta(examples=["The shop's warehouse"])]
    failing_since: Time
    consecutive_failures: Count
    last_error_code: ErrorCode | None


class ConfigurationStatus(TypedDict):
    """The last time the configuration was read."""

    last_read_at: Time
    last_reload_successful: bool
    last_reload_error: Annotated[str | None, Meta(examples=[None])]
    restart_needed: Annotated[
        list[str], Meta(examples=[[]], description="changed keys that take effect after a restart")
    ]


class RetryStatus(TypedDict):
    """The retry policy of subscriptions that have none of their own."""

    max_attempts: Attempts
    base_delay_seconds: Delay
    max_delay_seconds: Delay
    jitter: Jitter


class InFlight(TypedDict):
    """Requests to endpoints that this instance is sending now."""

    requests: Annotated[int, Meta(ge=0, examples=[12])]
    concurrency: Annotated[int, Meta(ge=1, examples=[400], description="maximum concurrent requests")]


class JobQueueStatus(TypedDict):
    """The job queue, over all instances. A count equal to `counted_up_to` means that many or more."""

    enabled: Annotated[bool, Meta(examples=[True], description="whether jobs can be enqueued and claimed")]
    backlog: Annotated[int, Meta(ge=0, examples=[3], description="queued jobs")]
    in_progress: Annotated[int, Meta(ge=0, examples=[2], description="jobs that an executor holds")]
    dead_letter_open: Annotated[
        int, Meta(ge=0, examples=[0], description="dead-letter jobs, neither cancelled nor requeued")
    ]
    oldest_queued_age_s: Annotated[
        Annotated[float, Meta(examples=[4.2])] | None,
        Meta(description="how long the oldest claimable job has been waiting; null: no job is claimable"),
    ]
    lease_active: Annotated[int, Meta(ge=0, examples=[2], description="jobs whose lease has not expired")]
    scheduled: Annotated[int, Meta(ge=0, examples=[0], description="queued jobs with a later start time")]
    retry_waiting: Annotated[int, Meta(ge=0, examples=[1], description="jobs that wait for a retry")]
    events_waiting: Annotated[
        int, Meta(ge=0, examples=[0], description="events whose jobs have not been created yet")
    ]
    counted_up_to: CountedUpTo


class RetentionStatus(TypedDict):
    """The periods in days (0: forever), and how far retention is. The counts are of all instances."""

    events_days: Days
    dead_letters_days: Days
    payloads_days: Days
    jobs_days: Days
    job_ledger_days: Days
    job_workflows_days: Days
    stats_days: Days
    swept_before: Annotated[
        Time | None, Meta(description="every event from before this time was examined; null: not yet")
    ]
    lag_seconds: Annotated[
        Annotated[float, Meta(ge=0, examples=[0.0])] | None,
        Meta(description="how much longer than events_days the oldest event was kept; null: events are kept"),
    ]
    oldest_event_at: Time | None
    kept_events: Annotated[
        int,
        Meta(
            ge=0,
            examples=[0],
            description="old events that are kept, because a delivery is not finished or because of a dead "
            "letter, up to 10,000",
        ),
    ]
    erasures_running: Count


class InstanceStatus(TypedDict):
    """The state of this instance, and the backlog of all instances."""

    version: Annotated[str, Meta(examples=["1.0.0"])]
    worker_id: Annotated[str, Meta(examples=["host:4711:9f8e7d6c"])]
    started_at: Time
    ready: bool
    unready_because: Annotated[list[str], Meta(examples=[[]])]
    draining: Annotated[bool, Meta(examples=[False])]
    database: DatabaseStatus
    in_flight: InFlight
    services: list[ServiceStatus]
    backlog: Annotated[BacklogStatus | None, Meta(description="null: not known now")]
    failing_endpoints: Annotated[
        list[FailingEndpointStatus] | None, Meta(description="the endpoints that have failed for longest")
    ]
    dead_letters_of_a_day: Annotated[
        Count | None,
        Meta(description="dead letters of the last 24 hours, requeued or not, counted up to 10,000"),
    ]
    job_queue: Annotated[JobQueueStatus | None, Meta(description="null: not known now")]
    retention: Annotated[RetentionStatus | None, Meta(description="null: not known now")]
    configuration: ConfigurationStatus
    retry: RetryStatus


NOT_READY = OtherResponse(
    "Not ready, with the reasons", {"ready": False, "because": ["the database does not answer"]}
)


class Health(Resource):
    """The health and status routes."""

    def __init__(
        self,
        unready: Callable[[], list[str]],
        status: Callable[[], InstanceStatus],
        registry: CollectorRegistry,
    ) -> None:
        self._unready = unready
        self.status = status
        self._registry = registry

    @route("GET /healthz", None, "Check that the process is alive", Alive, uses_database=False)
    async def _healthz(self, _: web.Request) -> web.Response:
        return json_response(Alive(alive=True))

    @route(
        "GET /readyz",
        None,
        "Check that this instance is ready for work",
        Readiness,
        other_responses={503: NOT_READY},
        uses_database=False,
    )
    async def _readyz(self, _: web.Request) -> web.Response:
        reasons = self._unready()
        if reasons:
            return json_response(Readiness(ready=False, because=reasons), 503)
        return json_response(Readiness(ready=True))

    @route(
        "GET /status",
        "read",
        "Get the status of this instance",
        InstanceStatus,
        description="Built from memory only, so it answers even when the database does not.",
        uses_database=False,
    )
    async def _get_status(self, _: web.Request) -> web.Response:
        return json_response(self.status())

    @route(
        "GET /metrics",
        "read",
        "Get metrics for Prometheus",
        responses.Metrics,
        media_type="text/plain",
        uses_database=False,
    )
    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(
            body=generate_latest(self._registry),
            headers=HEADERS | {"Content-Type": "text/plain; version=0.0.4"},
        )
