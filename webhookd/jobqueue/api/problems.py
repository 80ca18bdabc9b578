"""Turns refusals of the job queue into problems. The reason is the code, unless another API has that code."""

from typing import Any, TypeVar

from webhookd.http.responses import Problem
from webhookd.jobqueue.results import JobRefusal

Value = TypeVar("Value")

# 409, not 503: an operator disabled the queue, and nothing says that the same request may succeed soon.
DISABLED = (409, "job_substrate_disabled")
STALE_LEASE = (409, "stale_lease")
ALREADY_REPORTED = (409, "already_reported")

_DETAILS = {
    "job_substrate_disabled": "the job queue is disabled: enable it with `webhookd jobs enable`",
    "idempotency_conflict": "another job with different content has this kind and key",
    "stale_lease": "this lease token no longer holds the job: the lease expired, or the job is finished",
    "already_reported": "this lease already reported a different result, which counts",
    "running": "an executor holds the job; wait for its report or for the end of its lease",
    "finished": "the job has succeeded",
    "already_requeued": "the job was already requeued as job {job_id}",
    "not_dead_letter": "only a dead letter can be requeued",
    "workflow_conflict": "this workflow id exists with another kind or generator",
}
_MISSING = {
    "unknown_job": "no such job",
    "not_registered": "there is no registration for this event type and job kind",
}
_CODES = {"running": "job_running", "finished": "job_finished"}


def accepted(result: Value | JobRefusal) -> Value:
    """The result itself; raises a Problem for a refusal."""
    if not isinstance(result, JobRefusal):
        return result
    if result.reason in _MISSING:
        raise Problem(404, "not_found", _MISSING[result.reason])
    members: dict[str, Any] = {}
    if result.job_id is not None:
        members["job_id"] = result.job_id
    if result.status is not None:
        members["job_status"] = result.status
    code = _CODES.get(result.reason, result.reason)
    detail = _DETAILS.get(result.reason, result.reason).format(job_id=result.job_id)
    raise Problem(409, code, detail, **members)
