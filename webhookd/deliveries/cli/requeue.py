"""`dead-letters requeue`: by id, or by filter in pieces, so that a long one shows how far it is.

A piece is a request, and committed when it is answered: whatever ends this, what was answered is done.
"""

import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import click
import msgspec

from webhookd.cli import output
from webhookd.cli.client import Client
from webhookd.core.errors import RequestRefused

# Small enough that a bar moves, large enough that the way there and back does not matter.
PIECE_SIZE = 1000
NOT_DONE = 1
ALREADY = "already_requeued"


class Counts(msgspec.Struct):
    """Of one piece, or of all so far."""

    matched: int = 0
    requeued: int = 0
    skipped: int = 0

    def add(self, piece: Mapping[str, Any]) -> None:
        self.matched += piece["matched"]
        self.requeued += piece["requeued"]
        self.skipped += piece["skipped"]


def requeue_each(client: Client, dead_letter_ids: Sequence[int], *, as_json: bool) -> None:
    """One after the other; a refused one does not keep the others from it."""
    refused = False
    for one in dead_letter_ids:
        result: dict[str, Any] = {"id": one}
        try:
            result["saga_id"] = client.post(f"/v1/dead-letters/{one}/requeue").value["saga_id"]
            told = f"requeued as delivery {result['saga_id']}"
        except RequestRefused as error:
            result |= {"code": error.code, "saga_id": error.members.get("saga_id")}
            if error.code == ALREADY:
                told = f"was requeued before, as delivery {result['saga_id']}"
            else:
                told, refused = f"refused: {error}", True
        if as_json:
            output.show_json(msgspec.json.encode(result))
        else:
            click.echo(f"dead letter {one}: {told}")
    if refused:
        sys.exit(NOT_DONE)


def requeue_matching(client: Client, which: dict[str, Any], *, yes: bool, as_json: bool) -> None:
    """Count; with `yes`, then do it. Those that fail again meanwhile are not among them."""
    counted = Counts()
    bound = dict(which)
    for piece in _pieces(client, which, dry_run=True):
        counted.add(piece)
        bound["failed_before"] = piece["failed_before"]
    if not yes or not counted.requeued:
        _tell(counted, "requeued" if yes else "would be requeued", as_json=as_json, dry_run=not yes)
        if counted.requeued:
            if not as_json:
                click.echo(f"Nothing was done. To do it: {_command(which)}", err=True)
            sys.exit(NOT_DONE)
        return
    done = Counts()
    try:
        with output.progress(counted.matched, "requeue") as progress:
            for piece in _pieces(client, bound, dry_run=False):
                done.add(piece)
                progress.advance(progress.task_ids[0], piece["matched"])
    finally:  # also if it broke off: what is done is done
        _tell(done, "requeued", as_json=as_json, dry_run=False)


def _pieces(client: Client, which: Mapping[str, Any], *, dry_run: bool) -> Iterator[dict[str, Any]]:
    """The first one tells the time, by the database, at which all of them look."""
    asked = {"filter": dict(which), "dry_run": dry_run, "limit": PIECE_SIZE, "after_id": 0}
    while True:
        piece = client.post("/v1/dead-letters/requeue", asked).value
        yield piece
        if piece["last_id"] is None:
            return
        asked["after_id"] = piece["last_id"]
        asked["filter"] = dict(which) | {"failed_before": piece["failed_before"]}


def _tell(counts: Counts, what: str, *, as_json: bool, dry_run: bool) -> None:
    if as_json:
        output.show_json(msgspec.json.encode(msgspec.structs.asdict(counts) | {"dry_run": dry_run}))
        return
    why = " (requeued before, or its subscription is paused or unverified)" if counts.skipped else ""
    click.echo(f"{counts.matched} match, {counts.requeued} {what}, {counts.skipped} skipped{why}")


def _command(which: Mapping[str, Any]) -> str:
    options = {name.removesuffix("_id").replace("_", "-"): str(value) for name, value in which.items()}
    words = [word for name, value in options.items() for word in (f"--{name}", value)]
    return shlex.join(["webhookd", "dead-letters", "requeue", *(words or ["--all"]), "--yes"])
