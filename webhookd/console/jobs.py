"""The pages of the job queue: its state and a list of jobs, one job with its history, and its actions."""

from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
from aiohttp import web

from webhookd.console.api_calls import decoded
from webhookd.console.deliveries import CONFLICT
from webhookd.console.lists import UNPROCESSABLE, found_or_error, list_query, sentence
from webhookd.console.visits import Pages, Visit, page
from webhookd.http.responses import Problem

REFRESH_SECONDS = 5
MAX_REASON_CHARACTERS = 500
_VIEWS = (
    (None, "All"),
    ("queued", "Queued"),
    ("leased", "Leased"),
    ("in_progress", "In progress"),
    ("retry_waiting", "Waiting for a retry"),
    ("dead_letter", "Dead letters"),
    ("succeeded", "Succeeded"),
    ("cancelled", "Cancelled"),
    ("cleaned", "Cleaned"),
)
_UUID = "{id:[0-9a-fA-F-]{36}}"
# The states in which the API cancels or requeues a job.
_CANCELLABLE = ("queued", "retry_waiting", "dead_letter")
_RUNNING = ("leased", "in_progress")


class _PayloadOf(msgspec.Struct):
    """The part of a job that is shown byte for byte."""

    safe_payload: msgspec.Raw


class JobPages(Pages):
    """The job queue. The API has no jobs for single tenants, so the portal has no such page."""

    @page("GET /jobs", "jobs")
    async def list_jobs(self, visit: Visit) -> web.StreamResponse:
        """List jobs, newest first, and show whether the queue is enabled."""
        query = list_query(visit, "status", "kind")
        configuration = await visit.get("/v1/job-substrate")
        found, error = await found_or_error(visit, "/v1/jobs", query)
        return visit.render(
            "jobs.html",
            UNPROCESSABLE if error else 200,
            query=query,
            found=found,
            error=error,
            queue=configuration["queue"],
            views=_VIEWS,
        )

    @page(f"GET /jobs/{_UUID}", "jobs")
    async def show_job(self, visit: Visit) -> web.StreamResponse:
        """Show one job."""
        body = await visit.call("GET /v1/jobs/{id}", visit.item_id)
        job = msgspec.json.decode(body)
        payload = bytes(decoded(body, _PayloadOf).safe_payload).decode()
        return visit.render(
            "job.html",
            job=job,
            payload=payload,
            can_cancel=job["status"] in _CANCELLABLE and not job["requeued_as"],
            can_requeue=job["status"] == "dead_letter" and not job["requeued_as"],
            is_running=job["status"] in _RUNNING,
            max_reason_characters=MAX_REASON_CHARACTERS,
            refresh_seconds=REFRESH_SECONDS,
        )

    @page(f"POST /jobs/{_UUID}/cancel", "jobs")
    async def cancel(self, visit: Visit) -> web.StreamResponse:
        """Cancel a job."""
        body = {"reason": visit.form.get("reason", "")}

        async def cancel() -> tuple[str, str]:
            cancelled = await visit.post("/v1/jobs/{id}/cancel", visit.item_id, body)
            return visit.item_id, "It was cancelled before." if cancelled["duplicate"] else "It is cancelled."

        return await _acted(visit, cancel)

    @page(f"POST /jobs/{_UUID}/requeue", "jobs")
    async def requeue(self, visit: Visit) -> web.StreamResponse:
        """Requeue a dead letter, and go to the new job."""

        async def requeue() -> tuple[str, str]:
            made = await visit.post("/v1/jobs/{id}/requeue", visit.item_id)
            return made["job_id"], "This is the new job."

        return await _acted(visit, requeue)


async def _acted(visit: Visit, act: Callable[[], Coroutine[Any, Any, tuple[str, str]]]) -> web.Response:
    """Go to the job that the action returns, or say on this job's page why the action was refused."""
    try:
        job_id, message = await act()
    except Problem as problem:
        if problem.status not in (CONFLICT, UNPROCESSABLE):
            raise
        return visit.go(f"/jobs/{visit.item_id}", sentence(problem.detail), is_error=True)
    return visit.go(f"/jobs/{job_id}", message)
