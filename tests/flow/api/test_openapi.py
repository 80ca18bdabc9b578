"""The OpenAPI document matches the running daemon: every route, every response, every error.

Requests that schemathesis invents cannot leave this machine: the daemon runs with tests/support/site, which
resolves no names and blocks every connection beyond loopback.
"""

import asyncio
import json
import os
import sys
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema_rs
import pytest

from tests.flow.api.test_pages import path_of
from tests.flow.conftest import MakeDaemon
from tests.support import loopback_urls
from tests.support.api import Client, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import POLICY, Flow
from tests.support.names import Names

SCOPES = ("ingest", "subscriptions", "operate", "read", "jobs")
CLAIM = {"executor": "external_worker", "lease_holder": "worker-7"}
ROOT = Path(__file__).resolve().parents[3]
SEED = "20260301"
# A valid id need not exist, a valid URL may be rejected, and nothing is ever deleted.
EXCLUDED = "positive_data_acceptance,use_after_free,ensure_resource_availability,object_level_authorization"
EXAMPLES_PER_ROUTE = "8"
# Bounds against a hang. Not a bound on elapsed time: the run needs half a minute of CPU time, and shares two
# cores with four other pytests.
RUN_CPU_SECONDS = 180
REQUEST_TIMEOUT_SECONDS = "30"

# DESIGN §5 and PRODUCT §1 to 3, with the scope of each.
ROUTES = {
    "POST /v1/events": "ingest",
    "POST /v1/events/batch": "ingest",
    "GET /v1/events": "read",
    "GET /v1/events/{id}": "read",
    "POST /v1/subscriptions": "subscriptions",
    "GET /v1/subscriptions": "read",
    "GET /v1/subscriptions/{id}": "read",
    "PATCH /v1/subscriptions/{id}": "subscriptions",
    "POST /v1/subscriptions/{id}/verify": "subscriptions",
    "POST /v1/subscriptions/{id}/rotate-secret": "subscriptions",
    "DELETE /v1/subscriptions/{id}": "subscriptions",
    "POST /v1/subscriptions/{id}/test": "subscriptions",
    "POST /v1/subscriptions/{id}/replay": "operate",
    "GET /v1/tenants": "read",
    "GET /v1/tenants/{id}": "read",
    "PUT /v1/tenants/{id}": "subscriptions",
    "DELETE /v1/tenants/{id}": "subscriptions",
    "GET /v1/stats": "read",
    "GET /v1/stats/subscriptions": "read",
    "POST /v1/tenants/{id}/portal-link": "subscriptions",
    "POST /v1/console/login-link": "read",
    "GET /v1/erasures": "read",
    "GET /v1/erasures/{id}": "read",
    "POST /v1/deliveries/{id}/resend": "operate",
    "POST /v1/deliveries/{id}/retry": "operate",
    "GET /v1/attempts": "read",
    "GET /v1/deliveries": "read",
    "GET /v1/deliveries/{id}": "read",
    "GET /v1/dead-letters": "read",
    "GET /v1/dead-letters/{id}": "read",
    "POST /v1/dead-letters/{id}/requeue": "operate",
    "POST /v1/dead-letters/requeue": "operate",
    "POST /v1/jobs": "jobs",
    "GET /v1/jobs": "jobs",
    "GET /v1/jobs/{id}": "jobs",
    "POST /v1/jobs/claim": "jobs",
    "POST /v1/jobs/{id}/progress": "jobs",
    "POST /v1/jobs/{id}/succeed": "jobs",
    "POST /v1/jobs/{id}/fail": "jobs",
    "POST /v1/jobs/{id}/cancel": "jobs",
    "POST /v1/jobs/{id}/requeue": "jobs",
    "POST /v1/job-workflows": "jobs",
    "GET /v1/job-workflows/{id}": "jobs",
    "GET /v1/job-substrate": "jobs",
    "PATCH /v1/job-substrate": "operate",
    "POST /v1/job-registrations": "operate",
    "GET /healthz": None,
    "GET /readyz": None,
    "GET /status": "read",
    "GET /metrics": "read",
    "GET /openapi.json": None,
    "GET /docs": None,
}


async def document_of(api: Client) -> dict[str, Any]:
    """Return the document, which needs no token."""
    answer = await api.get("/openapi.json")
    assert (answer.status, answer.headers["Content-Type"]) == (200, "application/json")
    document: dict[str, Any] = answer.body
    return document


async def test_every_route_is_documented_with_its_scope(api: Client) -> None:
    """The document has exactly the routes of the contract, and the daemon exactly those of the document."""
    document = await document_of(api)
    assert document["openapi"] == "3.1.0"
    documented = {
        f"{method.upper()} {path}": operation
        for path, operations in document["paths"].items()
        for method, operation in operations.items()
    }
    assert documented.keys() == ROUTES.keys()
    for route, scope in ROUTES.items():
        security = [{"token": [scope]}, {}] if scope else []
        assert documented[route]["security"] == security, route
    for path, operations in document["paths"].items():
        [first, *_] = operations.values()
        refused = await api.request("OPTIONS", path_of(path, first))
        assert refused.problem == (405, "method_not_allowed"), path
        assert {method.upper() for method in operations} == set(refused.headers["Allow"].split(", ")), path


async def test_examples_match_their_schemas(api: Client) -> None:
    """Every example is a valid request or response."""
    document = await document_of(api)
    shown = 0
    for operations in document["paths"].values():
        for operation in operations.values():
            answers = [*operation["responses"].values(), operation.get("requestBody", {})]
            for content in (part for answer in answers for part in answer.get("content", {}).values()):
                if "example" in content:
                    schema = content["schema"] | {"components": document["components"]}
                    jsonschema_rs.validate(schema, content["example"], validate_formats=True)
                    shown += 1
    assert shown >= len(ROUTES)


async def test_example_job_can_be_enqueued(api: Client) -> None:
    """A new daemon accepts the example; its key is documented as a job's key."""
    document = await document_of(api)
    assert (await api.patch("/v1/job-substrate", {"enabled": True})).status == 200
    operation = document["paths"]["/v1/jobs"]["post"]
    example = operation["requestBody"]["content"]["application/json"]["example"]
    assert (await api.post("/v1/jobs", example)).status == 201
    claimed = await api.post("/v1/jobs/claim", CLAIM | {"kind": example["kind"]})
    assert (claimed.status, claimed.body["safe_payload"]) == (200, example["safe_payload"])
    schema = document["components"]["schemas"]["NewJob"]
    assert set(schema["required"]) == {"kind", "executor"}
    [key, _] = schema["properties"]["idempotency_key"]["anyOf"]
    assert "one job" in key["description"]
    [header] = operation["parameters"]
    assert (header["in"], header["name"]) == ("header", "Idempotency-Key")
    in_header = {name: value for name, value in example.items() if name != "idempotency_key"}
    again = await api.request(
        "POST", "/v1/jobs", json=in_header, headers={"Idempotency-Key": example["idempotency_key"]}
    )
    assert (again.status, again.body["duplicate"]) == (200, True)


async def test_examples_of_jobs_are_realistic(api: Client) -> None:
    """A duplicate says so, an error code differs from its message, and the numbers fit together."""
    document = await document_of(api)

    def example(path: str, method: str, status: str | None = None) -> Any:
        operation = document["paths"][path][method]
        part = operation["requestBody"] if status is None else operation["responses"][status]
        return part["content"]["application/json"]["example"]

    for path in ("/v1/jobs", "/v1/job-workflows"):
        duplicates = [example(path, "post", status)["duplicate"] for status in ("201", "200")]
        assert duplicates == [False, True], path
    assert example("/readyz", "get", "503") != example("/readyz", "get", "200")
    failure = example("/v1/jobs/{id}/fail", "post")
    assert failure["error_code"] != failure["error_message"]
    change = example("/v1/job-substrate", "patch")
    for policy in (change["policy"], change["kind_policy"]):
        assert policy["base_delay_seconds"] < policy["max_delay_seconds"] < policy["retention_seconds"]
    schemas = document["components"]["schemas"]
    of_events = schemas["PublishEvent"]["properties"]["correlation_id"]
    for name in ("NewJob", "NewWorkflow", "Job", "Workflow", "ClaimedJob"):
        assert schemas[name]["properties"]["correlation_id"] != of_events, name
    assert "documented" not in schemas["NewJob"]["description"]


@pytest.mark.once
async def test_daemon_matches_the_document(
    flow: Flow,
    endpoint: Endpoint,
    names: Names,
    make_daemon: MakeDaemon,
    session: aiohttp.ClientSession,
    tmp_path: Path,
) -> None:
    """Whatever schemathesis sends: no 5xx, and each response as documented, field by field."""
    subscription_id = await flow.subscribe(callback_url=endpoint.url("/hook"))
    await flow.publish()
    await flow.route()
    await flow.attempt(503, POLICY._replace(max_attempts=1))
    assert subscription_id == 1  # like the other ids: the first examples exist
    endpoint.echo_challenge()
    daemon = make_daemon(
        names.environment, services={"enabled": ["api"]}, api={"tokens": tokens({"all": SCOPES})}
    )
    daemon.token = "all"
    api = Client(session, await daemon.start())
    await daemon.until(lambda: daemon.get_json("/status")["backlog"], "seen")
    assert (await api.as_token("all").patch("/v1/job-substrate", {"enabled": True})).status == 200
    closed = closed_to_other_fields(await document_of(api))
    (tmp_path / "openapi.json").write_text(json.dumps(closed))
    exit_code, output = await schemathesis_run(tmp_path, daemon.port)
    assert exit_code == 0, output
    assert not daemon.faults()
    assert {host for host, _ in names.dials if not ip_address(host).is_loopback} == set()
    assert names.dials, "no subscription was verified"


def closed_to_other_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Return a stricter document, in which an undocumented field is an error."""
    for schema in document["components"]["schemas"].values():
        if schema.get("type") == "object":
            schema["additionalProperties"] = False
    return document


async def schemathesis_run(folder: Path, port: int) -> tuple[int, str]:
    """Run schemathesis; return its exit code and output."""
    command: list[str | Path] = [
        *("sh", "-c", f'ulimit -t {RUN_CPU_SECONDS}; exec "$@"', "sh"),
        Path(sys.executable).with_name("schemathesis"),
        *("run", folder / "openapi.json", "--url", f"http://127.0.0.1:{port}"),
        *("--seed", SEED, "--max-examples", EXAMPLES_PER_ROUTE, "--phases", "examples,coverage,fuzzing"),
        *("--header", "Authorization: Bearer all", "--continue-on-failure", "--no-color"),
        *("--checks", "all", "--exclude-checks", EXCLUDED),
        *(
            "--request-timeout",
            REQUEST_TIMEOUT_SECONDS,
            "--generation-database",
            "none",
            "--suppress-health-check",
            "all",
            "--warnings",
            "off",
        ),
    ]
    environment = {
        "SCHEMATHESIS_HOOKS": loopback_urls.__name__,
        "PYTHONPATH": str(ROOT),
        "NO_PROXY": "127.0.0.1",
    }
    process = await asyncio.create_subprocess_exec(
        *command,
        cwd=folder,
        env=os.environ | environment,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        output, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    return process.returncode or 0, output.decode()
