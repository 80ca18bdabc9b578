"""The pages of dead letters: a filtered list, and requeueing some of them, or all that match, in steps.

A step of the long action is one form. Its hidden fields have the position and the counts so far, so it can be
interrupted at any time: what was requeued before is skipped when the requeue is started again.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from aiohttp import web

from webhookd.console.lists import UNPROCESSABLE, Filters, found_or_error, list_query, times
from webhookd.console.names import endpoint_names
from webhookd.console.visits import Pages, Visit, page
from webhookd.core.limits import MAX_REQUEUE_LIMIT
from webhookd.http.responses import Problem

MAX_SELECTED = 100
# Dead letters of one step: well under a second.
STEP = 500

_FILTERS = ("subscription_id", "error_code", "tenant", "failed_after", "failed_before")
_COUNTS = ("requeued", "skipped", "payload_removed")
# Why a dead letter was not requeued, by the code of the problem.
_REFUSALS = {
    "already_requeued": "requeued before",
    "subscription_held": "the endpoint is disabled, deleted or not verified",
    "payload_removed": "the payload was removed by retention",
    "not_found": "not found",
}


class DeadLetterPages(Pages):
    """The list of dead letters, and requeueing."""

    @page("GET /dead-letters", "read")
    async def list_dead_letters(self, visit: Visit) -> web.StreamResponse:
        """List dead letters, newest first."""
        query = list_query(visit, *_FILTERS)
        found, error = await found_or_error(visit, "/v1/dead-letters", query)
        names = await endpoint_names(visit, (letter["subscription_id"] for letter in found["items"]))
        return visit.render(
            "dead_letters.html",
            UNPROCESSABLE if error else 200,
            query=query,
            filters=_chosen(query),
            found=found,
            error=error,
            names=names,
        )

    @page("POST /dead-letters/requeue-selected", "operate")
    async def requeue_selected(self, visit: Visit) -> web.StreamResponse:
        """Requeue the selected dead letters, and say why some were not."""
        back = _chosen(visit.form)
        ids = visit.selected("id")
        if not ids or len(ids) > MAX_SELECTED or not all(map(_is_number, ids)):
            message = f"Select 1 to {MAX_SELECTED} dead letters first."
            return visit.go("/dead-letters", message, is_error=True, query=back)
        requeued, refused = 0, Counter[str]()
        for letter_id in dict.fromkeys(ids):
            try:
                await visit.post("/v1/dead-letters/{id}/requeue", letter_id)
                requeued += 1
            except Problem as problem:
                if problem.code not in _REFUSALS:
                    raise
                refused[problem.code] += 1
        reasons = [f"{count} not: {_REFUSALS[code]}." for code, count in refused.items()]
        message = " ".join([f"{_letters(requeued)} requeued.", *reasons])
        return visit.go("/dead-letters", message, is_error=not requeued, query=back)

    @page("GET /dead-letters/requeue", "operate")
    async def confirm_requeue(self, visit: Visit) -> web.StreamResponse:
        """Count what would be requeued, up to a bound, and ask."""
        query = _chosen(list_query(visit, *_FILTERS))
        try:
            counts = await _requeue(visit, query, dry_run=True, limit=MAX_REQUEUE_LIMIT)
        except Problem as problem:
            if problem.status != UNPROCESSABLE:
                raise
            return visit.go("/dead-letters", query=query)  # which says what is wrong
        endpoint_id = query["subscription_id"]
        return visit.render(
            "requeue.html",
            query=query,
            counts=counts,
            limit=MAX_REQUEUE_LIMIT,
            names=await endpoint_names(visit, [int(endpoint_id)] if endpoint_id else []),
        )

    @page("POST /dead-letters/requeue", "operate")
    async def requeue_step(self, visit: Visit) -> web.StreamResponse:
        """Requeue the next ones, and go on until none is left."""
        form = visit.form
        query = _chosen(form)
        before = {name: _number(form, name) for name in (*_COUNTS, "after_id", "total")}
        step = await _requeue(
            visit, query, dry_run=False, limit=STEP, after_id=before["after_id"], until=form.get("until")
        )
        counts = {name: before[name] + step.get(name, 0) for name in _COUNTS}
        if step["last_id"] is None:
            return visit.go("/dead-letters", _result(counts), is_error=not counts["requeued"], query=query)
        position = {
            "after_id": step["last_id"],
            "until": step["failed_before"],
            "total": before["total"],
        }
        return visit.render(
            "requeue_progress.html",
            query=query,
            fields=query | counts | position,
            counts=counts,
            done=counts["requeued"] + counts["skipped"],
            total=before["total"],
        )


async def _requeue(
    visit: Visit,
    query: Mapping[str, str],
    *,
    dry_run: bool,
    limit: int,
    after_id: int = 0,
    until: str | None = None,
) -> dict[str, Any]:
    """Call the bulk requeue. `last_id` of the result is null at the end.

    `until` is the time of the count that the visitor confirmed, so that later failures are left out.
    """
    selection: dict[str, object] = dict(times(dict(query)))
    if until is not None:
        selection["failed_before"] = until
    if "subscription_id" in selection:
        if not _is_number(query["subscription_id"]):
            raise Problem(UNPROCESSABLE, "invalid_request", "the endpoint's id must be a number")
        selection["subscription_id"] = int(query["subscription_id"])
    body = {"filter": selection, "dry_run": dry_run, "limit": limit, "after_id": after_id}
    result: dict[str, Any] = await visit.post("/v1/dead-letters/requeue", body=body)
    return result


def _chosen(given: Mapping[str, str]) -> Filters:
    """Return the filters, without the position in the list."""
    return Filters({name: given[name] for name in _FILTERS if name in given})


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 19  # noqa: PLR2004  as an id


def _number(form: Mapping[str, str], name: str) -> int:
    text = form.get(name, "0")
    if not _is_number(text):
        raise Problem(UNPROCESSABLE, "invalid_request", f"{name} must be a number")
    return int(text)


def _letters(number: int) -> str:
    return "1 dead letter was" if number == 1 else f"{number:,} dead letters were"


def _result(counts: Mapping[str, int]) -> str:
    text = f"{_letters(counts['requeued'])} requeued."
    others = counts["skipped"] - counts["payload_removed"]
    if others:
        text += f" {others:,} skipped: requeued before, or the endpoint is disabled, deleted or not verified."
    if counts["payload_removed"]:
        text += f" {counts['payload_removed']:,} skipped: retention has removed the payload."
    return text
