"""Every setting with its default and range. webhookd.toml at the top of the repository gives the reasons.

Settings are frozen: a reload builds a new object and swaps it in.
"""

import ipaddress
import math
import re
from typing import Annotated, Literal, TypeAlias
from urllib.parse import parse_qs, unquote, urlsplit

import msgspec
from msgspec import Meta

from webhookd.core import limits


def is_loopback_host(host: str) -> bool:
    """Return whether the host is this machine's loopback interface."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def unencrypted_hosts(dsn: str) -> list[str]:
    """Return the other machines that the DSN connects to with sslmode=disable."""
    netloc, query = _parts(dsn)
    if query.get("sslmode", [""])[-1] != "disable":
        return []
    return [host for host in _hosts(netloc, query) if not is_loopback_host(host)]


def has_password(dsn: str) -> bool:
    """Return whether the DSN contains a password."""
    netloc, query = _parts(dsn)
    return ":" in netloc.rpartition("@")[0] or "password" in query


def without_password(dsn: str) -> str:
    """Return the hosts and the user of a DSN, for people to read."""
    netloc, query = _parts(dsn)
    user = netloc.rpartition("@")[0].partition(":")[0] or "".join(query.get("user", [])[:1])
    hosts = netloc.rpartition("@")[2] or ",".join(query.get("host", [])) or "this machine"
    return f"{unquote(hosts)} as {unquote(user)}" if user else unquote(hosts)


def with_database(dsn: str, name: str) -> str:
    """Return the DSN for another database of the server. The path overrides a `dbname` in the query."""
    parts = urlsplit(dsn)
    query = f"?{parts.query}" if parts.query else ""
    # Not urlunsplit: without a host it drops the slashes.
    return f"{parts.scheme}://{parts.netloc}/{name}{query}"


def _parts(dsn: str) -> tuple[str, dict[str, list[str]]]:
    try:
        parts = urlsplit(dsn)
        return parts.netloc, parse_qs(parts.query)
    except ValueError:
        return "", {}


def _hosts(netloc: str, query: dict[str, list[str]]) -> list[str]:
    """Return host names and addresses, without folders of sockets."""
    in_netloc = [re.sub(r":\d*$", "", part) for part in netloc.rpartition("@")[2].split(",")]
    in_query = [part for value in query.get("host", []) for part in value.split(",")]
    hosts = [unquote(host).strip("[]") for host in (*in_netloc, *in_query)]
    return [host for host in hosts if host and not host.startswith("/")]


Count: TypeAlias = Annotated[int, Meta(ge=1, le=limits.MAX_COUNT)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=limits.MAX_SECONDS)]
Attempts: TypeAlias = Annotated[int, Meta(ge=limits.MIN_ATTEMPTS, le=limits.MAX_ATTEMPTS)]
Delay: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_DELAY_SECONDS)]
Jitter: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JITTER)]
JobDelay: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JOB_DELAY_SECONDS)]
# 0 means forever.
Days: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_DAYS)]
JobRetention: TypeAlias = Annotated[float, Meta(ge=0, le=limits.MAX_JOB_RETENTION_SECONDS)]
LeaseRecoveries: TypeAlias = Annotated[int, Meta(ge=0, le=limits.MAX_LEASE_RECOVERIES)]
# Keep the value that is stored in the database, where operators and executors can set it with SQL.
FromDatabase: TypeAlias = Literal["database"]

Address: TypeAlias = Annotated[str, Meta(pattern=rf"^{limits.LISTEN_ADDRESS}\Z")]
LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")

Service: TypeAlias = Literal["api", "routing", "orchestration", "delivery", "reaper", "retention", "jobs"]
Scope: TypeAlias = Literal["ingest", "subscriptions", "operate", "read", "jobs"]
VerificationMethod: TypeAlias = Literal["challenge", "ping"]
SERVICES: tuple[Service, ...] = (
    "api",
    "routing",
    "orchestration",
    "delivery",
    "reaper",
    "retention",
    "jobs",
)


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the database is, and how this instance connects to it."""

    dsn: str = ""
    data_dir: str = ""
    pool_size: Annotated[int, Meta(ge=limits.MIN_POOL_SIZE, le=limits.MAX_POOL_SIZE)] = 10
    auto_migrate: bool | Literal["auto"] = "auto"
    allow_unencrypted: bool = False

    @property
    def embedded(self) -> bool:
        """Whether webhookd runs its own PostgreSQL in the data folder."""
        return not self.dsn

    @property
    def may_migrate(self) -> bool:
        """Whether `serve` upgrades an older schema. By default only on the embedded server."""
        return self.embedded if self.auto_migrate == "auto" else self.auto_migrate


class ServicesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which services this instance runs, how often they poll, and how long they have to stop."""

    enabled: tuple[Service, ...] = SERVICES
    poll_interval_seconds: Seconds = 1.0
    shutdown_grace_seconds: Seconds = 30.0


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An API token with its scopes. Only the token's digest is stored."""

    name: Annotated[str, Meta(min_length=1, max_length=limits.MAX_TOKEN_NAME_CHARACTERS)]
    sha256: Annotated[str, Meta(pattern=limits.SHA256_HEX)]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)]
    # Only rows of this tenant exist for it; None: all rows.
    tenant: Annotated[str, Meta(max_length=limits.MAX_TENANT_CHARACTERS, pattern=limits.TENANT)] | None = None


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the API listens, which tokens it accepts, and how large a request may be."""

    listen: Address = "127.0.0.1:8470"
    # The address under which browsers reach this daemon, for links; empty: unknown.
    public_url: str = ""
    # A second address that serves only /healthz, /readyz, /status and /metrics, for an instance without the
    # API.
    health_listen: Annotated[str, Meta(pattern=rf"({limits.LISTEN_ADDRESS})?\Z")] = ""
    tokens: tuple[Token, ...] = ()
    max_payload_bytes: Annotated[
        int, Meta(ge=limits.MIN_PAYLOAD_LIMIT_BYTES, le=limits.MAX_PAYLOAD_BYTES)
    ] = 1_048_576


class SubscriptionsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Rules for every subscription."""

    # How an endpoint can be verified. A ping is a signed test event that the endpoint answers with 2xx, for
    # receivers that cannot echo a challenge: it proves less, because any web server answers 200.
    verification_methods: Annotated[tuple[VerificationMethod, ...], Meta(min_length=1)] = ("challenge",)
    # How long a rotated secret keeps signing beside the new one.
    secret_overlap_seconds: Delay = 86_400.0


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Routing: events to deliveries."""

    batch_size: Count = 500


class OrchestrationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Orchestration: starts attempts for due deliveries, and applies their results."""

    batch_size: Count = 500
    subscription_window: Count = 128
    failing_after: Count = 10


class DeliverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Delivery: the requests to endpoints."""

    concurrency: Count = 400
    subscription_concurrency: Count = 64
    timeout_seconds: Seconds = 15.0
    lease_seconds: Seconds = 60.0
    ca_file: str = ""
    allow_networks: tuple[str, ...] = ()
    local: bool = False
    # At least as much as is stored of a response, because the challenge must be found in it.
    max_response_bytes: Annotated[
        int, Meta(ge=limits.MAX_RESPONSE_EXCERPT_BYTES, le=limits.MAX_RESPONSE_BYTES)
    ] = 65_536

    @property
    def networks(self) -> tuple[str, ...]:
        """Networks that endpoints may use although their addresses are not public."""
        return self.allow_networks + (LOOPBACK_NETWORKS if self.local else ())


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """The retry policy of subscriptions that have none of their own."""

    max_attempts: Attempts = 5
    base_delay_seconds: Delay = 30.0
    max_delay_seconds: Delay = 3600.0
    jitter: Jitter = 0.0


class ReaperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The reaper, which resets leases that expired without a report."""

    interval_seconds: Seconds = 5.0
    max_lease_resets: Annotated[int, Meta(ge=0, le=limits.MAX_LEASE_RESETS)] = 5


class RetentionSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How long finished rows are kept, in days; 0 keeps them forever."""

    events_days: Days = 0.0
    dead_letters_days: Days = 0.0
    payloads_days: Days = 0.0
    jobs_days: Days = 0.0
    job_ledger_days: Days = 0.0
    job_workflows_days: Days = 0.0
    stats_days: Days = 30.0


class ConsoleSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The web console and the portal of tenants."""

    name: str = "webhookd"
    logo: str = ""
    # Origins whose pages may show the portal in a frame.
    frame_ancestors: Annotated[tuple[str, ...], Meta(max_length=limits.MAX_FRAME_ANCESTORS)] = ()
    session_seconds: Annotated[float, Meta(ge=limits.MIN_SESSION_SECONDS, le=limits.MAX_SESSION_SECONDS)] = (
        28_800.0
    )


class JobsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The job queue's policy. It is stored in the database; a number given here is written to it."""

    max_attempts: Attempts | FromDatabase = "database"
    base_delay_seconds: JobDelay | FromDatabase = "database"
    max_delay_seconds: JobDelay | FromDatabase = "database"
    jitter: Jitter | FromDatabase = "database"
    max_lease_recoveries: LeaseRecoveries | FromDatabase = "database"
    retention_seconds: JobRetention | FromDatabase = "database"

    @property
    def given(self) -> dict[str, float]:
        """The numbers to write to the database."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value != "database"}


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The log's level and format."""

    level: Literal["debug", "info", "warning", "error"] = "info"
    format: Literal["auto", "text", "json"] = "auto"


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every section of webhookd.toml."""

    database: DatabaseSettings = DatabaseSettings()
    services: ServicesSettings = ServicesSettings()
    api: ApiSettings = ApiSettings()
    subscriptions: SubscriptionsSettings = SubscriptionsSettings()
    routing: RoutingSettings = RoutingSettings()
    orchestration: OrchestrationSettings = OrchestrationSettings()
    delivery: DeliverySettings = DeliverySettings()
    retry: RetrySettings = RetrySettings()
    reaper: ReaperSettings = ReaperSettings()
    retention: RetentionSettings = RetentionSettings()
    console: ConsoleSettings = ConsoleSettings()
    jobs: JobsSettings = JobsSettings()
    log: LogSettings = LogSettings()


def problems(settings: Settings) -> list[str]:
    """Return the rules between fields that these settings break. msgspec has checked each field already."""
    found = _problems_of_api(settings.api)
    if settings.api.listen == settings.api.health_listen and "api" in settings.services.enabled:
        found.append("api.health_listen must differ from api.listen, which serves the same routes")
    if not settings.database.allow_unencrypted:
        # The password, all payloads and the signing secrets would cross the network in clear text.
        found += [
            f"database.dsn has sslmode=disable for {host}; to allow that, set database.allow_unencrypted"
            for host in unencrypted_hosts(settings.database.dsn)
        ]
    enabled = settings.services.enabled
    if not enabled:
        found.append("services.enabled must name at least one service")
    if len(set(enabled)) < len(enabled):
        found.append("services.enabled names a service twice")
    delivery = settings.delivery
    if delivery.lease_seconds < delivery.timeout_seconds + 5:
        # A request may use its whole timeout, and its report a moment more, before the lease expires.
        found.append("delivery.lease_seconds must be at least delivery.timeout_seconds + 5")
    for network in delivery.allow_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            found.append(f"delivery.allow_networks: {error}")
    if settings.retry.max_delay_seconds < settings.retry.base_delay_seconds:
        found.append("retry.max_delay_seconds must be at least retry.base_delay_seconds")
    found += _problems_of_console(settings.console)
    given = settings.jobs.given
    if given.get("max_delay_seconds", math.inf) < given.get("base_delay_seconds", 0):
        found.append("jobs.max_delay_seconds must be at least jobs.base_delay_seconds")
    return found


def is_origin(text: str) -> bool:
    """Return whether the text is an origin as browsers send it: scheme, host and perhaps a port."""
    if len(text) > limits.MAX_ORIGIN_CHARACTERS or not re.match(limits.ORIGIN, text):
        return False
    try:
        parts = urlsplit(text)
        port = parts.port
        if "[" in text:
            ipaddress.IPv6Address(parts.hostname or "")
    except ValueError:
        return False
    return port is None or port >= 1


def host_and_port(address: str) -> tuple[str, int]:
    """Split a listening address; an IPv6 host loses its brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def _problems_of_api(api: ApiSettings) -> list[str]:
    found = []
    for key, address in (("listen", api.listen), ("health_listen", api.health_listen)):
        if not address:
            continue
        host, port = host_and_port(address)
        if not 1 <= port <= limits.HIGHEST_PORT:
            found.append(f"api.{key} must have a port from 1 to {limits.HIGHEST_PORT}")
        if not api.tokens and not is_loopback_host(host):
            # Without tokens every client that can connect may do everything.
            found.append(f"api.{key} must be a loopback address while api.tokens is empty")
    if api.public_url and not is_origin(api.public_url):
        found.append(
            "api.public_url must be an address like https://hooks.example.com, in lower case, without a "
            "path, a query or a user"
        )
    names = [token.name for token in api.tokens]
    found += [
        f"api.tokens: the name {name} is used twice" for name in sorted(set(names)) if names.count(name) > 1
    ]
    return found


def _problems_of_console(console: ConsoleSettings) -> list[str]:
    found = []
    name = console.name
    # Not only control characters: text that reverses the reading order is not printable either.
    if not 1 <= len(name) <= limits.MAX_CONSOLE_NAME_CHARACTERS or not name.isprintable() or not name.strip():
        found.append(
            f"console.name must be 1 to {limits.MAX_CONSOLE_NAME_CHARACTERS} printable characters, "
            "not only spaces"
        )
    found += [
        f"console.frame_ancestors: {origin!a} must be an origin like https://app.example.com, in lower case, "
        "without a path"
        for origin in console.frame_ancestors
        if not is_origin(origin)
    ]
    return found
