"""What there is to set, with defaults and bounds. webhookd.toml at the top of the repository says why.

Frozen: a reload makes a new object and swaps it in.
"""

import ipaddress
import math
from typing import Annotated, Literal, TypeAlias

import msgspec
from msgspec import Meta

from webhookd.core.dsn import is_loopback_host, unencrypted_hosts

Count: TypeAlias = Annotated[int, Meta(ge=1, le=100_000)]
Seconds: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]
Delay: TypeAlias = Annotated[float, Meta(ge=0, le=31_536_000)]
# Whatever the database has, because operators and executors that speak SQL set it there.
FromDatabase: TypeAlias = Literal["database"]

_ADDRESS = r"(\[[0-9a-fA-F:]+\]|[^:\[\]]+):[0-9]{1,5}"
Address: TypeAlias = Annotated[str, Meta(pattern=rf"^{_ADDRESS}\Z")]
HIGHEST_PORT = 65535
LOOPBACK_NETWORKS = ("127.0.0.0/8", "::1/128")

Service: TypeAlias = Literal["api", "routing", "orchestration", "delivery", "reaper", "jobs"]
Scope: TypeAlias = Literal["ingest", "subscriptions", "operate", "read", "jobs"]
SERVICES: tuple[Service, ...] = ("api", "routing", "orchestration", "delivery", "reaper", "jobs")


class DatabaseSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the database is."""

    dsn: str = ""
    data_dir: str = ""
    pool_size: Annotated[int, Meta(ge=2, le=1000)] = 10
    auto_migrate: bool | Literal["auto"] = "auto"
    allow_unencrypted: bool = False

    @property
    def embedded(self) -> bool:
        """Whether it is our own server, in the data folder."""
        return not self.dsn

    @property
    def may_migrate(self) -> bool:
        """Whether `serve` brings an older schema up to date. Our own server has nobody else who would."""
        return self.embedded if self.auto_migrate == "auto" else self.auto_migrate


class ServicesSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What this instance does, and at what pace it looks for work by itself."""

    enabled: tuple[Service, ...] = SERVICES
    poll_interval_seconds: Seconds = 1.0
    shutdown_grace_seconds: Seconds = 30.0


class Token(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who may do what. Of the token itself only its digest is here."""

    name: Annotated[str, Meta(min_length=1, max_length=100)]
    sha256: Annotated[str, Meta(pattern=r"^[0-9a-fA-F]{64}\Z")]
    scopes: Annotated[tuple[Scope, ...], Meta(min_length=1)]


class ApiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Who may ask, and where."""

    listen: Address = "127.0.0.1:8470"
    # A further one, of /healthz, /readyz, /status and /metrics alone: for an instance without the API.
    health_listen: Annotated[str, Meta(pattern=rf"({_ADDRESS})?\Z")] = ""
    tokens: tuple[Token, ...] = ()
    max_payload_bytes: Annotated[int, Meta(ge=1024, le=8_388_608)] = 1_048_576


class SubscriptionsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for every subscription."""

    # How long a rotated secret goes on signing beside the new one.
    secret_overlap_seconds: Delay = 86_400.0


class RoutingSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Events to sagas."""

    batch_size: Count = 500


class OrchestrationSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sagas to jobs, and results to sagas."""

    batch_size: Count = 500
    subscription_window: Count = 128
    failing_after: Count = 10


class DeliverySettings(msgspec.Struct, frozen=True, kw_only=True):
    """Requests."""

    concurrency: Count = 400
    subscription_concurrency: Count = 64
    timeout_seconds: Seconds = 15.0
    lease_seconds: Seconds = 60.0
    ca_file: str = ""
    allow_networks: tuple[str, ...] = ()
    local: bool = False
    # At least what is kept of an answer: a challenge must be found in it.
    max_response_bytes: Annotated[int, Meta(ge=4096, le=16_777_216)] = 65_536

    @property
    def networks(self) -> tuple[str, ...]:
        """What may be delivered to although it is not public."""
        return self.allow_networks + (LOOPBACK_NETWORKS if self.local else ())


class RetrySettings(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and how long between."""

    max_attempts: Annotated[int, Meta(ge=1, le=1000)] = 5
    base_delay_seconds: Delay = 30.0
    max_delay_seconds: Delay = 3600.0
    jitter: Annotated[float, Meta(ge=0, le=1)] = 0.0


class ReaperSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Lost leases."""

    interval_seconds: Seconds = 5.0
    max_lease_resets: Annotated[int, Meta(ge=0, le=1000)] = 5


class JobsSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The job substrate's policy, which is in the database: a number here is written there."""

    max_attempts: Annotated[int, Meta(ge=1, le=1000)] | FromDatabase = "database"
    base_delay_seconds: Delay | FromDatabase = "database"
    max_delay_seconds: Delay | FromDatabase = "database"
    jitter: Annotated[float, Meta(ge=0, le=1)] | FromDatabase = "database"
    max_lease_recoveries: Annotated[int, Meta(ge=0, le=1000)] | FromDatabase = "database"
    retention_seconds: Delay | FromDatabase = "database"

    @property
    def given(self) -> dict[str, float]:
        """What the database is told."""
        return {name: value for name, value in msgspec.structs.asdict(self).items() if value != "database"}


class LogSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What is logged, and how."""

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
    jobs: JobsSettings = JobsSettings()
    log: LogSettings = LogSettings()


def problems(settings: Settings) -> list[str]:
    """What is wrong between fields, each of which may be right by itself."""
    found = _problems_of_api(settings.api)
    if settings.api.listen == settings.api.health_listen and "api" in settings.services.enabled:
        found.append("api.health_listen must be another address than api.listen, which serves the same")
    if not settings.database.allow_unencrypted:
        # The password, every payload and the signing secrets could be read on the way.
        found += [
            f"database.dsn has sslmode=disable to {host}: if that is meant, set database.allow_unencrypted"
            for host in unencrypted_hosts(settings.database.dsn)
        ]
    enabled = settings.services.enabled
    if not enabled:
        found.append("services.enabled must name at least one service")
    if len(set(enabled)) < len(enabled):
        found.append("services.enabled names a service twice")
    delivery = settings.delivery
    if delivery.lease_seconds < delivery.timeout_seconds + 5:
        # A request may take its whole timeout, and its report a moment more, while the lease runs.
        found.append("delivery.lease_seconds must be at least delivery.timeout_seconds + 5")
    for network in delivery.allow_networks:
        try:
            ipaddress.ip_network(network)
        except ValueError as error:
            found.append(f"delivery.allow_networks: {error}")
    if settings.retry.max_delay_seconds < settings.retry.base_delay_seconds:
        found.append("retry.max_delay_seconds must be at least retry.base_delay_seconds")
    given = settings.jobs.given
    if given.get("max_delay_seconds", math.inf) < given.get("base_delay_seconds", 0):
        found.append("jobs.max_delay_seconds must be at least jobs.base_delay_seconds")
    return found


def host_and_port(address: str) -> tuple[str, int]:
    """The two parts of an address to listen on."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def is_loopback(address: str) -> bool:
    """Whether only this machine can reach it."""
    host, _ = host_and_port(address)
    return is_loopback_host(host)


def _problems_of_api(api: ApiSettings) -> list[str]:
    found = []
    for key, address in (("listen", api.listen), ("health_listen", api.health_listen)):
        if not address:
            continue
        if not 1 <= host_and_port(address)[1] <= HIGHEST_PORT:
            found.append(f"api.{key} must have a port of 1 to {HIGHEST_PORT}")
        if not api.tokens and not is_loopback(address):
            # Without tokens everything is allowed to whoever can connect.
            found.append(f"api.{key} must be a loopback address as long as api.tokens is empty")
    names = [token.name for token in api.tokens]
    found += [f"api.tokens: {name} is there twice" for name in sorted(set(names)) if names.count(name) > 1]
    return found
