"""Reload of access settings: API tokens, allowed networks, trusted certificates."""

import asyncio
from pathlib import Path

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.flow.reload.swaps import swaps
from tests.flow.test_scenarios import subscribed
from tests.support.api import tokens
from tests.support.certificates import Certificates
from tests.support.daemon import DaemonProcess
from tests.support.endpoint import Endpoint
from tests.support.flow import Flow
from tests.support.waiting import CONDITION_TIMEOUT_SECONDS, until
from webhookd.local_certificate import LocalCertificate

FAILED = "select exists (select from webhookd.webhook_delivery_jobs where error_code = $1)"
ALL_COMPLETED = "select bool_and(status = 'Completed') from webhookd.webhook_delivery_sagas"
# A failing delivery is not given up during a test.
PATIENT = {"max_attempts": 1000}


@swaps("api.tokens")
async def test_tokens_are_reloaded(make_api: MakeApi) -> None:
    """From the next request, a removed token or scope is rejected and a new token works."""
    before = {"operator": ("read",), "old": ("read",), "narrowed": ("read", "ingest")}
    api = await make_api(api={"tokens": tokens(before)})
    api.daemon.token = "operator"
    old, new, narrowed = (api.as_token(token) for token in ("old", "new", "narrowed"))
    assert (await old.get("/v1/events")).status == 200
    assert (await new.event()).status == 401
    assert (await narrowed.event()).status == 202
    after = {"operator": ("read",), "new": ("ingest",), "narrowed": ("read",)}
    api.daemon.configure(api={"tokens": tokens(after)})
    assert await api.daemon.reload()
    assert (await old.get("/v1/events")).problem == (401, "unauthorized")
    assert (await new.event()).status == 202
    assert (await narrowed.event()).problem == (403, "forbidden")
    assert (await narrowed.get("/v1/events")).status == 200


@swaps("delivery.allow_networks")
async def test_removed_network_is_blocked(flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon) -> None:
    """Even over an open connection; after the network is added again, the delivery succeeds."""
    await subscribed(flow, endpoint)
    daemon = await make_daemon(retry=PATIENT).start()
    await deliver_over_one_connection(flow, endpoint)
    await blocked_between_reloads(
        flow,
        endpoint,
        daemon,
        "ADDRESS_BLOCKED",
        delivery=({"allow_networks": []}, {"allow_networks": ["127.0.0.0/8"]}),
    )


@swaps("delivery.ca_file")
async def test_removed_ca_file_is_not_trusted(
    flow: Flow, endpoint: Endpoint, make_daemon: MakeDaemon, certificates: Certificates
) -> None:
    """Even over an open connection; after the CA file is configured again, the delivery succeeds."""
    await subscribed(flow, endpoint)
    ca_file = str(certificates.ca_file)
    daemon = await make_daemon(retry=PATIENT).start()
    await deliver_over_one_connection(flow, endpoint)
    await blocked_between_reloads(
        flow, endpoint, daemon, "TLS_FAILED", delivery=({"ca_file": ""}, {"ca_file": ca_file})
    )


@swaps("delivery.local")
async def test_deliveries_to_this_machine_need_delivery_local(
    flow: Flow, make_daemon: MakeDaemon, tmp_path: Path
) -> None:
    """delivery.local alone allows its address and trusts the certificate of its receivers."""
    local = LocalCertificate.in_folder(tmp_path / "data")
    certificate = tmp_path / "certificate.pem"
    certificate.write_bytes(local.key_file.read_bytes() + local.certificate_file.read_bytes())
    closed = {"allow_networks": [], "ca_file": "", "local": False}
    daemon = make_daemon(retry=PATIENT, database={"data_dir": str(tmp_path / "data")}, delivery=closed)
    with Endpoint(certificate) as endpoint:
        await subscribed(flow, endpoint)
        daemon.configure(delivery={"local": True})
        await daemon.start()
        await deliver_over_one_connection(flow, endpoint)
        await blocked_between_reloads(
            flow, endpoint, daemon, "ADDRESS_BLOCKED", delivery=({"local": False}, {"local": True})
        )


async def deliver_over_one_connection(flow: Flow, endpoint: Endpoint) -> None:
    """Deliver until a connection is reused; an idle connection is closed soon."""
    connections = [0]
    async with asyncio.timeout(CONDITION_TIMEOUT_SECONDS):
        while connections[-1:] != connections[-2:-1]:
            await flow.publish()
            await endpoint.received(len(connections))
            await until(flow.daemon, ALL_COMPLETED)
            connections = [0, *(request.connection for request in endpoint.requests)]


async def blocked_between_reloads(
    flow: Flow,
    endpoint: Endpoint,
    daemon: DaemonProcess,
    error_code: str,
    delivery: tuple[dict[str, object], dict[str, object]],
) -> None:
    """After the first reload a delivery fails with this code and is not sent; after the second it arrives."""
    closed, opened = delivery
    arrived = len(endpoint.requests)
    daemon.configure(delivery=closed)
    assert await daemon.reload()
    await flow.publish()
    await until(flow.daemon, FAILED, error_code)
    assert len(endpoint.requests) == arrived
    daemon.configure(delivery=opened)
    assert await daemon.reload()
    await endpoint.received(arrived + 1)
    await until(flow.daemon, ALL_COMPLETED)
