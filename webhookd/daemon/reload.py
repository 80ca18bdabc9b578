"""What a reload swaps, and what waits for a restart. Pure, but for the CA files that are read."""

from collections.abc import Iterator
from pathlib import Path

from webhookd.core.folders import data_dir
from webhookd.core.settings import Settings
from webhookd.local_ca import Authority
from webhookd.outbound.addresses import AddressPolicy, IPAddress
from webhookd.outbound.client import VERIFICATION_CONNECTIONS, ClientOptions, trusted_tls

# Read once, at the start: a change is named, and waits for a restart. All else is asked for at each use.
NEEDS_RESTART = (
    ("database", "dsn"),
    ("database", "data_dir"),
    ("database", "pool_size"),
    ("database", "auto_migrate"),
    ("database", "allow_unencrypted"),
    ("services", "enabled"),
    ("api", "listen"),
    ("api", "health_listen"),
)


def client_options(settings: Settings, own_addresses: frozenset[tuple[IPAddress, int]]) -> ClientOptions:
    """What delivery needs of the settings, with everything done that can fail."""
    delivery = settings.delivery
    return ClientOptions(
        policy=AddressPolicy.of(delivery.networks),
        tls=trusted_tls(*_ca_files(settings)),
        own_addresses=own_addresses,
        max_response_bytes=delivery.max_response_bytes,
        max_connections=delivery.concurrency + VERIFICATION_CONNECTIONS,
    )


def _ca_files(settings: Settings) -> Iterator[Path]:
    if settings.delivery.ca_file:
        yield Path(settings.delivery.ca_file)
    if settings.delivery.local:
        yield Authority.in_folder(data_dir(settings)).ca_file


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """Settings that changed and are read only at the start."""
    return [
        f"{section}.{key}"
        for section, key in NEEDS_RESTART
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]
