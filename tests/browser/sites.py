"""Daemons with data to look at: the demo and the hostile data. They run until the end of a block."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from tests.browser.demo import MEBIBYTE, Filled, demo_names, fill_with_demo, fill_with_hostile_data
from tests.support.api import Client
from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.database import Cluster, Database
from tests.support.endpoint import Endpoint
from tests.support.names import Names
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS

Fill = Callable[[Client, Any, Endpoint], Awaitable[Filled]]


@dataclass(frozen=True)
class Site:
    """A daemon, what is in its database, and the endpoint that it delivers to."""

    daemon: DaemonProcess
    database: Database
    api: Client
    endpoint: Endpoint
    filled: Filled


@asynccontextmanager
async def site(
    cluster: Cluster, certificates: Certificates, folder: Path, fill: Fill, **sections: dict[str, Any]
) -> AsyncIterator[Site]:
    """Start a daemon on a new database, and fill it."""
    names_folder = folder / "names"
    names_folder.mkdir()
    database = await cluster.create_database(migrated=True)
    daemon = DaemonProcess(
        folder,
        database.dsn("daemon"),
        demo_names(Names(names_folder)).environment,
        delivery={"ca_file": str(certificates.ca_file), "allow_networks": ["127.0.0.0/8"]},
        retry={"base_delay_seconds": 0.05, "max_delay_seconds": 86_400.0},
        services={"poll_interval_seconds": 0.2},
    )
    daemon.is_forked = True
    daemon.configure(**sections)
    timeout = aiohttp.ClientTimeout(CONDITION_TIMEOUT_SECONDS)
    try:
        with Endpoint(certificates.good) as endpoint:
            async with aiohttp.ClientSession(timeout=timeout) as session:
                api = Client(session, await daemon.start())
                filled = await fill(api, await database.connect("superuser"), endpoint)
                yield Site(daemon, database, api, endpoint, filled)
    finally:
        daemon.stop()
        await cluster.drop_database(database)


@asynccontextmanager
async def demo_site(cluster: Cluster, certificates: Certificates, folder: Path) -> AsyncIterator[Site]:
    """Start a daemon with the demo data."""
    async with site(cluster, certificates, folder, fill_with_demo) as made:
        yield made


@asynccontextmanager
async def hostile_site(cluster: Cluster, certificates: Certificates, folder: Path) -> AsyncIterator[Site]:
    """Start a daemon with the hostile data."""
    # The limit is for the whole request, and a payload of it has 1 MiB.
    api = {"max_payload_bytes": 2 * MEBIBYTE}
    async with site(cluster, certificates, folder, fill_with_hostile_data, api=api) as made:
        yield made
