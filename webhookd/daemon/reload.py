"""The part of a reload that can fail, and the settings that need a restart. Pure, but reads CA files."""

from collections.abc import Iterator
from pathlib import Path

from webhookd.core.configuration import data_dir
from webhookd.core.settings import Settings
from webhookd.local_certificate import LocalCertificate
from webhookd.outbound.addresses import AddressPolicy, IPAddress
from webhookd.outbound.client import VERIFICATION_CONNECTIONS, ClientOptions, trusted_tls

# Read once, at start. A change is reported and takes effect after a restart. All other settings are read at
# each use.
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
    """Build the client's options. Everything that can fail happens here, before the swap."""
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
        yield LocalCertificate.in_folder(data_dir(settings)).certificate_file


def restart_needed(old: Settings, new: Settings) -> list[str]:
    """Return the changed settings that are read only at start."""
    return [
        f"{section}.{key}"
        for section, key in NEEDS_RESTART
        if getattr(getattr(old, section), key) != getattr(getattr(new, section), key)
    ]
