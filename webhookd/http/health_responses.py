"""What is answered about this instance itself: as responses.py, for /healthz, /readyz and /status."""

from typing import Annotated, Literal, NotRequired, TypeAlias, TypedDict

from msgspec import Meta

from webhookd.http.fields import Attempts, Count, Delay, ErrorCode, Id, Time


class Alive(TypedDict):
    """The process answers."""

    alive: bool


class Readiness(TypedDict):
    """Whether work sent here is done now."""

    ready: bool
    because: NotRequired[Annotated[list[str], Meta(examples=[[]], description="why it is not ready")]]


class DatabaseStatus(TypedDict):
    """Whether the database answers."""

    available: bool


class ServiceStatus(TypedDict):
    """One of the loops that this instance runs."""

    name: Annotated[str, Meta(examples=["delivery"])]
    state: Literal["running", "failing", "ended"]
    restarts: Annotated[int, Meta(ge=0, examples=[0])]
    last_error: Annotated[str | None, Meta(examples=[None])]


class StageBacklog(TypedDict):
    """What waits for one stage."""

    stage: Annotated[str, Meta(examples=["routing"])]
    waiting: Count
    oldest_at: Time | None


CountedUpTo: TypeAlias = Annotated[
    int, Meta(ge=1, examples=[10_000], description="nothing is counted further than this")
]


class Backlog(TypedDict):
    """What waits, as the last look saw it."""

    seen_at: Time
    counted_up_to: CountedUpTo
    stages: list[StageBacklog]


class FailingEndpoint(TypedDict):
    """An endpoint that is probed, one request at a time."""

    subscription_id: Id
    failing_since: Time
    consecutive_failures: Count
    last_error_code: ErrorCode | None


class ConfigurationStatus(TypedDict):
    """How the configuration was last read."""

    last_read_at: Time
    last_reload_successful: bool
    last_reload_error: Annotated[str | None, Meta(examples=[None])]
    restart_needed: Annotated[
        list[str], Meta(examples=[[]], description="keys that changed, and wait for the next start")
    ]


class RetryStatus(TypedDict):
    """What holds for a subscription without a policy of its own."""

    max_attempts: Attempts
    base_delay_seconds: Delay
    max_delay_seconds: Delay
    jitter: Annotated[float, Meta(ge=0, le=1, examples=[0.0])]


class InFlight(TypedDict):
    """Requests to endpoints under way in this instance."""

    requests: Annotated[int, Meta(ge=0, examples=[12])]
    concurrency: Annotated[int, Meta(ge=1, examples=[400])]


class JobQueue(TypedDict):
    """How the job substrate is, in the whole cluster; a count of `counted_up_to` means so many or more."""

    enabled: Annotated[bool, Meta(examples=[True], description="whether jobs may be enqueued and claimed")]
    backlog: Annotated[int, Meta(ge=0, examples=[3], description="queued")]
    in_progress: Annotated[int, Meta(ge=0, examples=[2], description="held by an executor")]
    dead_letter_open: Annotated[int, Meta(ge=0, examples=[0], description="given up, and not resolved")]
    oldest_queued_age_s: Annotated[
        Annotated[float, Meta(examples=[4.2])] | None,
        Meta(description="for how long the oldest could have been claimed; null: none could"),
    ]
    lease_active: Annotated[int, Meta(ge=0, examples=[2], description="held, and the lease not run out")]
    scheduled: Annotated[int, Meta(ge=0, examples=[0], description="of the queued, those for later")]
    retry_waiting: Annotated[int, Meta(ge=0, examples=[1], description="wait for their next attempt")]
    events_waiting: Annotated[
        int, Meta(ge=0, examples=[0], description="events whose jobs are still to be made")
    ]
    counted_up_to: CountedUpTo


class Status(TypedDict):
    """What an operator asks first."""

    version: Annotated[str, Meta(examples=["1.0.0"])]
    worker_id: Annotated[str, Meta(examples=["host:4711:9f8e7d6c"])]
    started_at: Time
    ready: bool
    unready_because: Annotated[list[str], Meta(examples=[[]])]
    draining: Annotated[bool, Meta(examples=[False])]
    database: DatabaseStatus
    in_flight: InFlight
    services: list[ServiceStatus]
    backlog: Annotated[Backlog | None, Meta(description="null: the database does not answer")]
    failing_endpoints: Annotated[
        list[FailingEndpoint] | None, Meta(description="those that fail for the longest")
    ]
    dead_letters_of_a_day: Annotated[
        Count | None, Meta(description="given up in the last 24 hours, requeued or not, counted up to 10,000")
    ]
    job_queue: Annotated[JobQueue | None, Meta(description="null: the database does not answer")]
    configuration: ConfigurationStatus
    retry: RetryStatus
