"""`make bench`: every measure, in alternating rounds; prints a table, and writes it with all its numbers.

A measure that fails says so in its lines, and the others go on; then the exit status is 1.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.bench import machine, plot
from tests.bench.bed import Bed, open_bed
from tests.bench.measures import backlog, fan_out, ingest, latency, throughput, variants
from tests.bench.measures.turns import Numbers
from tests.bench.rows import ROWS, Line, lines
from tests.bench.scale import QUICK, SUBSCRIPTIONS, Scale
from tests.bench.table import markdown_table, plain_table
from tests.support import history

Measure = Callable[[Bed, int], Awaitable[Numbers]]

MEASURES: dict[str, Measure] = {
    "throughput": throughput.throughput,
    "idle": latency.idle,
    "latency": latency.loaded,
    "history": variants.history,
    "snapshot": variants.snapshot,
    "hanging": variants.hanging,
    "instances": variants.instances,
    "backlog": backlog.backlog,
    "single": ingest.single,
    "batch": ingest.batch,
    "fan-out": fan_out.fan_out,
}
SHORTEST_HISTORY = history.SUBSCRIPTIONS * history.FEW_LETTERS
# A history of ten million takes its time to be written; nothing else comes near.
ROUND_TIMEOUT_SECONDS = 3600


@dataclass
class Outcome:
    """What became of one measure."""

    rounds: list[Numbers] = field(default_factory=list)
    failure: str | None = None


def main() -> int:
    """Run, print and write."""
    given = arguments()
    scale = QUICK if given.quick else Scale()
    if given.history is not None:
        scale = dataclasses.replace(scale, history=given.history)
    rounds = given.rounds or (1 if given.quick else 5)
    # A terminated run ends its children just as an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return uvloop.run(run(given.only or list(MEASURES), rounds, scale, given.output))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=positive, help="of each measure (5; with --quick 1)")
    parser.add_argument("--only", nargs="+", choices=MEASURES, metavar="NAME", help=", ".join(MEASURES))
    parser.add_argument("--quick", action="store_true", help="small numbers, to try it: three minutes")
    parser.add_argument(
        "--history",
        type=history_size,
        help="terminal sagas of the long history (1 million)",
    )
    parser.add_argument("--output", type=Path, default=Path("bench-results"), help="folder (bench-results)")
    return parser.parse_args()


def positive(text: str) -> int:
    """A number that there can be something of."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def history_size(text: str) -> int:
    """What tests/support/history.py can divide among its subscriptions."""
    number = positive(text)
    if number < SHORTEST_HISTORY:
        raise argparse.ArgumentTypeError(f"must be at least {SHORTEST_HISTORY}")
    return number


async def run(names: Sequence[str], rounds: int, scale: Scale, folder: Path) -> int:
    """All rounds of each measure, then the results; the exit status."""
    outcomes: dict[str, Outcome] = {}
    async with open_bed(scale) as bed:
        found = machine.facts(bed.server.version, bed.receiver.name)
        print(machine.caption(found), flush=True)
        for name in names:
            outcomes[name] = await outcome_of(name, bed, rounds)
        missing = bed.missing
    all_lines = [
        line
        for name, outcome in outcomes.items()
        for line in lines(ROWS[name], outcome.rounds, missing, outcome.failure)
    ]
    write(folder, all_lines, found, scale, outcomes)
    print(f"\n{plain_table(all_lines)}\n\n{notes(scale)}\nWritten to {folder}/")
    return 1 if any(outcome.failure for outcome in outcomes.values()) else 0


async def outcome_of(name: str, bed: Bed, rounds: int) -> Outcome:
    """The rounds of one measure, up to the first that fails."""
    outcome = Outcome()
    for number in range(rounds):
        began = time.monotonic()
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_SECONDS):
                outcome.rounds.append(await MEASURES[name](bed, number))
        except Exception as error:  # whatever it is, the other measures go on
            outcome.failure = failure_text(error)
            print(f"{name} {number + 1}/{rounds}: {outcome.failure}", file=sys.stderr, flush=True)
            break
        numbers = ", ".join(f"{key} {value:.5g}" for key, value in outcome.rounds[-1].items())
        print(f"{name} {number + 1}/{rounds} ({time.monotonic() - began:.0f} s): {numbers}", flush=True)
    return outcome


def failure_text(error: Exception) -> str:
    """One short line, for a cell of the table."""
    words = [type(error).__name__, *str(error).strip().splitlines()[:1]]
    return f"failed: {': '.join(words)}"[:200]


def notes(scale: Scale) -> str:
    """What the table does not say by itself."""
    return (
        f"webhookd: one instance with its defaults, {SUBSCRIPTIONS} event types with one subscription each. "
        "Rates are from the commit of all work to the end of the last piece, with processes that are warm; "
        "the spread is from the least to the most of the rounds, ratios are of the two sides of one round. "
        f"The long history has {scale.history:,} terminal sagas, the long backlog {scale.backlog:,} events. "
        "WAL is all that the server wrote from before publishing to the end, events, payloads and indexes "
        "included; processor time is without publishing. Times of arrival under load are the receiver's: "
        "nginx tells whole milliseconds."
    )


def write(
    folder: Path,
    all_lines: Sequence[Line],
    found: dict[str, str | int],
    scale: Scale,
    outcomes: dict[str, Outcome],
) -> None:
    """The table as text and Markdown, all numbers as JSON, and the picture."""
    folder.mkdir(parents=True, exist_ok=True)
    caption = machine.caption(found)
    (folder / "table.txt").write_text(f"{caption}\n\n{plain_table(all_lines)}\n\n{notes(scale)}\n")
    (folder / "table.md").write_text(f"{markdown_table(all_lines)}\n\n{caption} {notes(scale)}\n")
    raw = {
        "machine": found,
        "scale": dataclasses.asdict(scale),
        "measures": {name: dataclasses.asdict(outcome) for name, outcome in outcomes.items()},
    }
    (folder / "results.json").write_text(json.dumps(raw, indent=2) + "\n")
    plot.draw(all_lines, caption, folder / "results.png")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
