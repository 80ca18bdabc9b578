"""The substrate's refusals as problems: their reasons are the codes, but for what others have a code for."""

from typing import Any, TypeVar

from webhookd.http.problems import Problem
from webhookd.jobqueue.types import JobRefusal

Value = TypeVar("Value")

# 409, not 503: an operator's decision is no fault, and nothing says that the same request may succeed soon.
DISABLED = (409, "job_substrate_disabled")
STALE_LEASE = (409, "stale_lease")
ALREADY_REPORTED = (409, "already_reported")

_WORDS = {
    "job_substrate_disabled": "the job substrate is off: `webhookd jobs enable` switches it on",
    "idempotency_conflict": "this kind and key are another job's, of other content",
    "stale_lease": "this lease token does not hold the job any more: its lease ran out, or it is over",
    "already_reported": "this lease has reported otherwise before: that counts",
    "running": "an executor holds it: it is left to its holder",
    "finished": "it has succeeded",
    "already_requeued": "it was requeued before, as job {job_id}",
    "not_dead_letter": "only a dead letter can be requeued",
    "workflow_conflict": "this workflow is of another kind or generator",
}
_MISSING = {
    "unknown_job": "no such job",
    "not_registered": "events of this type do not give jobs of this kind: they were never registered",
}
_CODES = {"running": "job_running", "finished": "job_finished"}


def done(result: Value | JobRefusal) -> Value:
    """What was done; a Problem if it was refused."""
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
    words = _WORDS.get(result.reason, result.reason).format(job_id=result.job_id)
    raise Problem(409, code, words, **members)
