"""/v1/jobs: the life of a job over HTTP, waiting claims, scopes, and events that create jobs."""

import asyncio
import json
from typing import Any
from uuid import uuid4

import pytest

from tests.flow.conftest import MakeApi, MakeDaemon
from tests.support.api import Client, is_time, tokens
from tests.support.endpoint import Endpoint
from tests.support.flow import EVENT_TYPE, Flow
from tests.support.waiting import until

KIND = "thumbnail.make"
NEW = {"kind": KIND, "executor": "Agent", "idempotency_key": "picture-7", "payload_ref": "s3://pictures/7"}
CLAIM = {"kind": KIND, "executor": "Agent", "lease_holder": "worker-1"}
AT_ONCE = {"base_delay_seconds": 0.0}
# Only wake-ups count, polling never happens.
NEVER_POLLS = {"poll_interval_seconds": 3600.0}


async def enable(api: Client) -> None:
    """Enable the job queue."""
    assert (await api.patch("/v1/job-substrate", {"enabled": True})).body["enabled"] is True


async def claim(api: Client, **fields: Any) -> dict[str, Any]:
    """Claim a job; there must be one."""
    answer = await api.post("/v1/jobs/claim", CLAIM | fields)
    assert answer.status == 200, answer
    body: dict[str, Any] = answer.body
    return body


async def test_life_of_a_job(api: Client, endpoint: Endpoint) -> None:
    """Enqueue, claim, renew, succeed; repeats are duplicates; events and ledger are complete."""
    disabled = (409, "job_substrate_disabled")
    assert (await api.post("/v1/jobs", NEW)).problem == disabled
    assert (await api.post("/v1/jobs/claim", CLAIM | {"wait_seconds": 30})).problem == disabled
    await enable(api)
    await api.subscribe(endpoint, event_type="dot.job.succeeded")

    first = await api.post("/v1/jobs", NEW | {"safe_payload": {"width": 200}, "correlation_id": "trace-7"})
    assert (first.status, first.body["status"], first.body["duplicate"]) == (201, "queued", False)
    again = {name: value for name, value in NEW.items() if name != "idempotency_key"}
    header = {"Idempotency-Key": "picture-7"}
    second = await api.request(
        "POST", "/v1/jobs", json=again | {"safe_payload": {"width": 200}}, headers=header
    )
    assert (second.status, second.body["duplicate"]) == (200, True)
    job_id = first.body["job_id"]
    assert second.body["job_id"] == job_id
    other = await api.post("/v1/jobs", NEW)
    assert other.problem == (409, "idempotency_conflict")
    assert (other.body["job_id"], other.body["job_status"]) == (job_id, "queued")

    assert (await api.post("/v1/jobs/claim", CLAIM | {"executor": "Codex"})).status == 204
    job = await claim(api, lease_seconds=30)
    assert (job["job_id"], job["attempt"], job["safe_payload"]) == (job_id, 1, {"width": 200})
    assert is_time(job["leased_until"])
    assert (await api.post("/v1/jobs/claim", CLAIM)).status == 204
    path = f"/v1/jobs/{job_id}"
    stale = {"lease_token": str(uuid4())}
    for action in ("progress", "succeed", "fail"):
        assert (await api.post(f"{path}/{action}", stale)).problem == (409, "stale_lease")
    assert (await api.post(f"{path}/cancel", {"reason": "x"})).problem == (409, "job_running")
    token = {"lease_token": job["lease_token"]}
    renewed = await api.post(f"{path}/progress", token | {"status_signal": "half"})
    assert (renewed.body["status"], renewed.body["started"]) == ("in_progress", True)
    assert renewed.body["leased_until"] > job["leased_until"]
    done = token | {"result_ref": "s3://thumbnails/7"}
    reports = [(await api.post(f"{path}/succeed", done)).body for _ in range(2)]
    assert [(report["status"], report["duplicate"]) for report in reports] == [
        ("succeeded", False),
        ("succeeded", True),
    ]
    assert (await api.post(f"{path}/fail", token)).problem == (409, "already_reported")
    assert (await api.post(f"{path}/cancel", {"reason": "x"})).problem == (409, "job_finished")

    shown = (await api.get(path)).body
    assert (shown["status"], shown["result_ref"], shown["lease_holder"]) == (
        "succeeded",
        done["result_ref"],
        "worker-1",
    )
    assert "lease_token" not in shown
    assert [run["command"] for run in shown["runs"]] == [
        f"fn_job_{command}" for command in ("enqueue", "claim", "progress", "succeed")
    ]
    assert [run["actor"] for run in shown["runs"]] == ["api"] * 4
    assert shown["runs"][1]["detail"]["lease_holder"] == "worker-1"
    await endpoint.received(2)
    message = json.loads(endpoint.requests[-1].body)
    assert (message["job_id"], message["result_ref"]) == (job_id, done["result_ref"])
    assert endpoint.requests[-1].headers["webhook-correlation-id"] == "trace-7"


async def test_retry_dead_letter_requeue_and_cancel(make_api: MakeApi) -> None:
    """A failed job is retried, dead-lettered, requeued once and cancelled; its workflow follows."""
    api = await make_api(jobs=AT_ONCE, api={"max_payload_bytes": 4096})
    await api.daemon.until(lambda: api.daemon.logged("[jobs] was written to the database"), "written")
    await enable(api)
    own = str(uuid4())
    opened = {"workflow_kind": "import", "generator": "MOT:1", "workflow_id": own}
    answers = [await api.post("/v1/job-workflows", opened) for _ in range(2)]
    assert [answer.status for answer in answers] == [201, 200]
    assert (await api.post("/v1/job-workflows", opened | {"generator": "x"})).problem == (
        409,
        "workflow_conflict",
    )

    job_id = (await api.post("/v1/jobs", NEW | {"workflow_id": own})).body["job_id"]
    job = await claim(api)
    token = {"lease_token": job["lease_token"]}
    failed = await api.post(
        f"/v1/jobs/{job_id}/fail", token | {"error_code": "E", "error_message": "no such"}
    )
    assert (failed.body["status"], failed.body["attempts"]) == ("retry_waiting", 1)
    job = await claim(api, wait_seconds=30)
    assert (job["job_id"], job["attempt"]) == (job_id, 2)
    gone = {"lease_token": job["lease_token"], "permanent": True}
    assert (await api.post(f"/v1/jobs/{job_id}/requeue")).problem == (409, "not_dead_letter")
    assert (await api.post(f"/v1/jobs/{job_id}/fail", gone)).body["status"] == "dead_letter"
    assert (await api.get(f"/v1/job-workflows/{own}")).body["status"] == "failed"
    requeued = await api.post(f"/v1/jobs/{job_id}/requeue")
    assert (requeued.status, requeued.body["parent_job_id"]) == (201, job_id)
    once_more = await api.post(f"/v1/jobs/{job_id}/requeue")
    assert once_more.problem == (409, "already_requeued")
    child = requeued.body["job_id"]
    assert once_more.body["job_id"] == child
    cancelled = [(await api.post(f"/v1/jobs/{child}/cancel", {"reason": "enough"})).body for _ in range(2)]
    assert [answer["duplicate"] for answer in cancelled] == [False, True]
    workflow = (await api.get(f"/v1/job-workflows/{own}")).body
    assert (workflow["status"], [job["job_id"] for job in workflow["jobs"]]) == ("cancelled", [job_id, child])

    others = [
        (await api.post("/v1/jobs", NEW | {"idempotency_key": str(n), "kind": kind})).body["job_id"]
        for n, kind in enumerate((KIND, "other", KIND))
    ]
    newest_first = [*others[::-1], child, job_id]
    for query, expected in (
        ("", newest_first),
        ("?status=queued", others[::-1]),
        (f"?kind={KIND}", [others[2], others[0], child, job_id]),
        (f"?kind={KIND}&status=cancelled", [child, job_id]),
    ):
        listed = await pages(api, f"/v1/jobs{query}", limit=2)
        assert [job for page in listed for job in page] == expected, query
        assert all(len(page) == 2 for page in listed[:-1])
    assert (await api.get(f"/v1/jobs?cursor={uuid4()}")).problem == (422, "invalid_parameter")
    assert (await api.get(f"/v1/jobs/{uuid4()}")).problem == (404, "not_found")
    assert (await api.post(f"/v1/jobs/{uuid4()}/requeue")).problem == (404, "not_found")


async def pages(api: Client, path: str, limit: int) -> list[list[str]]:
    """The ids of each page of a list of jobs."""
    found, cursor = [], ""
    while True:
        answer = await api.get(f"{path}{'&' if '?' in path else '?'}limit={limit}{cursor}")
        assert answer.status == 200, answer
        found.append([item["job_id"] for item in answer.body["items"]])
        if answer.body["next_cursor"] is None:
            return found
        cursor = f"&cursor={answer.body['next_cursor']}"


async def test_invalid_requests_are_refused(api: Client, flow: Flow) -> None:
    """Each invalid value has its error; nothing is stored. Clients cannot publish lifecycle events."""
    await enable(api)
    for fields in (
        {"executor": "MOT"},
        {"safe_payload": {"token": "x"}},
        {"safe_payload": [1]},
        {"safe_payload": {"a": "\0"}},
        {"safe_payload": {"a": "x" * 3000 * 6}},
        {"idempotency_key": None},
        {"idempotency_key": "event:1"},
        {"process_after": "0001-01-01T00:00:00+14:00"},
        {"deadline_at": "infinity"},
        {"priority": 40_000},
        {"kind": "a\nb"},
    ):
        answer = await api.post("/v1/jobs", NEW | fields)
        assert answer.status in (413, 422), (fields, answer)
        assert answer.code in ("invalid_request", "payload_too_large"), fields
    # MOT only generates jobs: it can claim none, under any holder name.
    for claim in ({"executor": "MOT"}, {"executor": "MOT", "lease_holder": "Agent", "wait_seconds": 30}):
        refused = await api.post("/v1/jobs/claim", CLAIM | claim)
        assert refused.problem == (422, "invalid_request"), claim
        assert "executor" in refused.body["detail"], refused
    assert (await api.post("/v1/jobs", NEW | {"parent_job_id": str(uuid4())})).problem == (404, "not_found")
    assert (await api.post("/v1/jobs", NEW | {"causation_event_id": 99})).problem == (404, "not_found")
    refused = await api.event(event_type="dot.job.succeeded")
    assert refused.body["detail"] == "event_type must not start with dot.job.: reserved for the job queue"
    assert (await api.event(event_type="dot.jobs")).status == 202
    registered = {"event_type": "dot.job.failed", "job_kind": KIND, "executor": "Agent"}
    assert (await api.post("/v1/job-registrations", registered)).problem == (422, "invalid_request")
    which = {"event_type": EVENT_TYPE, "job_kind": KIND}
    assert (await api.post("/v1/job-registrations", which)).problem == (422, "invalid_request")
    registration = which | {"executor": "Agent", "priority": 3, "active": True}
    assert (await api.post("/v1/job-registrations", registration)).body == registration
    deactivated = await api.post("/v1/job-registrations", which | {"active": False})
    assert deactivated.body == registration | {"active": False}
    before = (await api.get("/v1/job-substrate")).body
    after = (await api.patch("/v1/job-substrate", {"kind_policy": {"job_kind": "zz"}})).body
    assert (after["kind_policies"], after["decisions"]) == (before["kind_policies"], before["decisions"])
    policy = {"kind_policy": {"job_kind": KIND, "max_attempts": 1, "jitter": None}, "policy": {"jitter": 0.5}}
    changed = (await api.patch("/v1/job-substrate", policy)).body
    assert changed["policy"]["jitter"] == 0.5
    assert [(kind["job_kind"], kind["max_attempts"]) for kind in changed["kind_policies"]] == [(KIND, 1)]
    assert await flow.daemon.fetchval("select count(*) from webhookd.job_queue") == 0


@pytest.mark.once
async def test_scopes(make_api: MakeApi) -> None:
    """All job routes need `jobs`; the switch and the registrations need `operate`."""
    api = await make_api(
        api={"tokens": tokens({"worker": ["jobs"], "operator": ["operate"], "reader": ["read"]})},
        services={"enabled": ["api"]},
    )
    worker, operator, reader = (api.as_token(name) for name in ("worker", "operator", "reader"))
    assert (await worker.patch("/v1/job-substrate", {"enabled": True})).problem == (403, "forbidden")
    assert (await operator.patch("/v1/job-substrate", {"enabled": True})).status == 200
    registration = {"event_type": EVENT_TYPE, "job_kind": KIND, "executor": "Agent"}
    assert (await worker.post("/v1/job-registrations", registration)).problem == (403, "forbidden")
    assert (await operator.post("/v1/job-registrations", registration)).status == 200
    for other in (operator, reader):
        for path in ("/v1/jobs", f"/v1/jobs/{uuid4()}", "/v1/job-substrate"):
            assert (await other.get(path)).problem == (403, "forbidden"), path
        assert (await other.post("/v1/jobs", NEW)).problem == (403, "forbidden")
        assert (await other.post("/v1/jobs/claim", CLAIM)).problem == (403, "forbidden")
    job_id = (await worker.post("/v1/jobs", NEW)).body["job_id"]
    assert (await worker.post("/v1/jobs/claim", CLAIM | {"lease_holder": "operator"})).status == 200
    shown = (await worker.get(f"/v1/jobs/{job_id}")).body
    assert (shown["enqueued_by"], shown["lease_holder"]) == ("worker", "operator")
    # The actor is the name of the token, whatever the holder calls itself.
    assert [run["actor"] for run in shown["runs"]] == ["worker", "worker"]
    # Opened workflows are in the ledger but are not listed as decisions.
    for _ in range(21):
        opened = {"workflow_kind": "import", "generator": "MOT:1"}
        assert (await worker.post("/v1/job-workflows", opened)).status == 201
    decisions = (await worker.get("/v1/job-substrate")).body["decisions"]
    assert [(decision["command"], decision["actor"]) for decision in decisions] == [
        ("fn_job_register_event", "operator"),
        ("fn_job_enable", "operator"),
    ]
    assert decisions[1]["detail"] == {"enabled": True}
    assert (await api.get("/v1/jobs")).problem == (401, "unauthorized")


@pytest.mark.once
async def test_waiting_claims(flow: Flow, make_api: MakeApi) -> None:
    """A job enqueued on any instance ends a wait, as does a stop; a disconnected client claims nothing."""
    api = await make_api(services=NEVER_POLLS | {"enabled": ["api"]})
    another = await make_api(services={"enabled": ["api"]})
    await enable(api)
    waits = CLAIM | {"wait_seconds": 30}
    first, second = (asyncio.create_task(api.post("/v1/jobs/claim", waits)) for _ in range(2))
    body = json.dumps(waits).encode()
    _, gone = await asyncio.open_connection("127.0.0.1", api.daemon.port)
    gone.write(
        b"POST /v1/jobs/claim HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
        + f"Content-Length: {len(body)}\r\n\r\n".encode()
        + body
    )
    await api.daemon.until(lambda: waiting(api) == 3, "waiting")
    gone.transport.abort()
    ids = [(await another.post("/v1/jobs", NEW)).body["job_id"]]
    done, _ = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
    ids.append((await api.post("/v1/jobs", NEW | {"idempotency_key": "8"})).body["job_id"])
    answers = [await first, await second]
    assert [answer.status for answer in answers] == [200, 200]
    assert len(done) == 1
    assert {answer.body["job_id"] for answer in answers} == set(ids)
    third = (await another.post("/v1/jobs", NEW | {"idempotency_key": "9"})).body["job_id"]
    await api.daemon.until(lambda: waiting(api) == 0, "the disconnected claim has ended")
    assert (
        await flow.daemon.fetchval("select status from webhookd.job_queue where job_id = $1", third)
    ) == "queued"

    last = asyncio.create_task(api.post("/v1/jobs/claim", waits | {"kind": "none"}))
    await api.daemon.until(lambda: waiting(api) == 1, "waiting")
    api.daemon.sigterm()
    assert (await last).status == 204
    assert await api.daemon.ended() == 0


def waiting(api: Client) -> float:
    """Number of waiting claims."""
    return api.daemon.metric("webhookd_job_queue_claims_waiting")


async def test_event_creates_one_job(flow: Flow, make_daemon: MakeDaemon, make_api: MakeApi) -> None:
    """With three instances, each event of a registered type creates exactly one job; other events none."""
    api = await make_api(services={"enabled": ["api", "jobs"]})
    for _ in range(2):
        await make_daemon(services={"enabled": ["api", "jobs"]}).start()
    await enable(api)
    registration = {"event_type": EVENT_TYPE, "job_kind": KIND, "executor": "Agent", "priority": 3}
    assert (await api.post("/v1/job-registrations", registration)).status == 200
    events = [{"event_type": EVENT_TYPE, "payload": n, "correlation_id": f"trace-{n}"} for n in range(60)]
    accepted = (await api.post("/v1/events/batch", {"events": events})).body["events"]
    await api.event(event_type="other.type")
    waits = {"wait_seconds": 30}
    jobs = [await claim(api, **waits) for _ in events]
    assert sorted(job["causation_event_id"] for job in jobs) == [event["id"] for event in accepted]
    assert {job["correlation_id"] for job in jobs} == {f"trace-{n}" for n in range(60)}
    await until(flow.daemon, "select not exists (select from webhookd.job_event_queue)")
    assert await flow.daemon.fetchval("select count(*) from webhookd.job_queue") == 60
    await api.daemon.until(lambda: api.daemon.metric("webhookd_job_queue_in_progress") == 60, "seen")
    assert api.daemon.get_json("/status")["job_queue"]["lease_active"] == 60
    assert b"60 in progress" in api.daemon.get("/")[1]
