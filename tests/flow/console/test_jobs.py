"""The pages of the job queue: the empty state, the list, one job with its history, and its actions."""

import re
from typing import Any
from uuid import UUID, uuid4

from tests.flow.conftest import MakeApi
from tests.flow.console.conftest import MakeVisitor
from tests.support.api import Client, tokens
from tests.support.visitor import Shown

HOSTILE = "<script>alert(1)</script>\u202e"
SCOPES = ("operate", "read", "jobs")


async def enqueue(api: Client, key: str, **fields: Any) -> str:
    """Enqueue a job."""
    body = {"kind": "a", "executor": "external_worker", "idempotency_key": key} | fields
    answer = await api.post("/v1/jobs", body)
    assert answer.status == 201, answer
    return str(answer.body["job_id"])


async def claim(api: Client) -> dict[str, Any]:
    """Claim a job."""
    body = {"kind": "a", "executor": "external_worker", "lease_holder": "worker-7"}
    answer = await api.post("/v1/jobs/claim", body)
    assert answer.status == 200, answer
    return dict(answer.body)


async def fail(api: Client) -> str:
    """Claim a job, and report that it failed for good."""
    job = await claim(api)
    report = {
        "lease_token": job["lease_token"],
        "error_code": "NO_PICTURE",
        "error_message": HOSTILE,
        "permanent": True,
    }
    assert (await api.post(f"/v1/jobs/{job['job_id']}/fail", report)).status == 200
    return str(job["job_id"])


def listed(response: Shown) -> list[str]:
    """Return the jobs of a list, in its order."""
    assert response.status == 200, response
    return re.findall(r'data-head="Job"><a class="mono" href="/jobs/([^"]*)"', response.html)


async def test_search_finds_a_job_by_its_id(make_api: MakeApi, make_visitor: MakeVisitor) -> None:
    """It opens the job; another UUID finds nothing."""
    api = await make_api()
    await api.patch("/v1/job-substrate", {"enabled": True})
    job_id = await enqueue(api, "one")
    visitor = make_visitor(api)
    assert (await visitor.get(f"/search?q={job_id}")).location == f"/jobs/{job_id}"
    assert (await visitor.get(f"/search?q={uuid4()}")).status == 200


async def test_disabled_queue_says_how_to_enable_it(make_api: MakeApi, make_visitor: MakeVisitor) -> None:
    """And an enabled one without jobs, how to enqueue one."""
    api = await make_api()
    visitor = make_visitor(api)
    assert "webhookd jobs enable" in (await visitor.get("/jobs")).text
    await api.patch("/v1/job-substrate", {"enabled": True})
    shown = (await visitor.get("/jobs")).text
    assert "No jobs yet" in shown
    assert "webhookd jobs enable" not in shown


async def test_jobs_are_listed_and_filtered(make_api: MakeApi, make_visitor: MakeVisitor) -> None:
    """By status and kind, in pages; a wrong filter is explained. They stay visible when it is disabled."""
    api = await make_api()
    await api.patch("/v1/job-substrate", {"enabled": True})
    ids = [await enqueue(api, f"key {HOSTILE[:-1]} {n}") for n in range(51)]
    other = await enqueue(api, "other", kind="b")
    dead = await fail(api)
    visitor = make_visitor(api)
    first = await visitor.get("/jobs")
    assert listed(first) == [other, *ids[:1:-1]]
    assert "<script>alert" not in first.html
    [older] = re.findall(r'href="([^"]*)" rel="next"', first.html)
    assert listed(await visitor.get(older.replace("&amp;", "&"))) == ids[1::-1]
    assert listed(await visitor.get("/jobs?status=dead_letter")) == [dead]
    assert listed(await visitor.get("/jobs?kind=b")) == [other]
    assert listed(await visitor.get("/jobs?kind=b&status=succeeded")) == []
    assert (await visitor.get("/jobs?status=none")).status == 422
    await api.patch("/v1/job-substrate", {"enabled": False})
    disabled = await visitor.get("/jobs")
    assert listed(disabled) == listed(first)
    assert "webhookd jobs enable" in disabled.text


async def test_job_shows_its_history_and_is_requeued_or_cancelled(
    make_api: MakeApi, make_visitor: MakeVisitor
) -> None:
    """A dead letter is requeued once, and leads to the new job; a waiting one is cancelled with a reason."""
    api = await make_api()
    await api.patch("/v1/job-substrate", {"enabled": True})
    await enqueue(api, "first", safe_payload={"note": HOSTILE, "width": 200})
    dead = await fail(api)
    visitor = make_visitor(api)
    path = f"/jobs/{dead}"
    page = await visitor.get(path)
    assert page.status == 200
    assert "<script>alert" not in page.html
    for text in ("NO_PICTURE", "worker-7", "Leased", "Dead letter", '"width": 200', "U+202E", "fn_job_claim"):
        assert text in page.text, text
    form = {"form_token": re.findall(r'name="form_token" value="([^"]*)"', page.html)[0]}
    made = await visitor.post(f"{path}/requeue", form)
    assert made.status == 303
    new = made.location.removeprefix("/jobs/")
    assert str(UUID(new)) != dead
    assert "This is the new job." in (await visitor.get(made.location)).text
    await visitor.post(f"{path}/requeue", form)
    again = await visitor.get(path)
    assert f"The job was already requeued as job {new}." in again.text
    assert "/requeue" not in again.html
    await visitor.post(f"/jobs/{new}/cancel", form)
    assert 'class="message bad"' in (await visitor.get(f"/jobs/{new}")).html, "the reason is missing"
    await visitor.post(f"/jobs/{new}/cancel", form | {"reason": HOSTILE})
    cancelled = await visitor.get(f"/jobs/{new}")
    assert "It is cancelled." in cancelled.text
    assert HOSTILE[:-1] in cancelled.text
    assert "Cancel the job" not in cancelled.text
    await enqueue(api, "second")
    running = (await claim(api))["job_id"]
    assert "Cancel the job" not in (await visitor.get(f"/jobs/{running}")).text
    await visitor.post(f"/jobs/{running}/cancel", form | {"reason": "x"})
    assert "an executor holds the job" in (await visitor.get(f"/jobs/{running}")).text.lower()
    assert (await visitor.get("/jobs/00000000-0000-0000-0000-000000000000")).status == 404
    assert (await visitor.get(f"/jobs/{'-' * 36}")).status == 404


async def test_pages_need_the_scope_and_the_form_token(make_api: MakeApi, make_visitor: MakeVisitor) -> None:
    """Without the scope there is no tab and no page; the portal has none."""
    api = await make_api(api={"tokens": tokens({"all": SCOPES, "reader": ["read", "operate"]})})
    api = api.as_token("all")
    await api.patch("/v1/job-substrate", {"enabled": True})
    path = f"/jobs/{await enqueue(api, 'key')}"
    reader, operator = make_visitor(api), make_visitor(api)
    await reader.log_in("reader")
    await operator.log_in("all")
    assert 'href="/jobs"' not in (await reader.get("/deliveries")).html
    assert (await reader.get("/jobs")).status == 403
    assert (await reader.get(path)).status == 403
    assert (await reader.submit(f"{path}/cancel", "/deliveries", reason="x")).status == 403
    assert (await operator.post(f"{path}/cancel", {"reason": "x", "form_token": "y"})).status == 403
    assert (await operator.post(f"{path}/requeue", {})).status == 403
    assert (await operator.get(f"/portal{path}")).status == 404
    assert (await api.get(f"/v1{path}")).body["status"] == "queued"
