"""`make bench`: runs every measure in several rounds, prints a table, and writes all numbers to a folder.

A failed measure is reported in its lines of the table and does not stop the run; the exit status is 1.
"""

import argparse
import asyncio
import contextlib
import dataclasses
import json
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from tests.bench import machine, plot
from tests.bench.bed import Bed, open_bed
from tests.bench.idleness import MEAN_LIMIT_CORES, WINDOW_LIMIT_CORES, WINDOW_SECONDS, OtherLoad, watching
from tests.bench.measures import (
    fan_out,
    ingest,
    latency,
    live,
    paced,
    statistics,
    sweep,
    throughput,
    variants,
)
from tests.bench.rows import DISTURBED, ROWS, Line, lines, markdown_table, plain_table
from tests.bench.scale import QUICK, SUBSCRIPTIONS, Numbers, Scale
from tests.support import history
from tests.support.installations import installation_near, installation_of
from webhookd.embedded.installation import Installation

Measure = Callable[[Bed, int], Awaitable[Numbers]]

MEASURES: dict[str, Measure] = {
    "throughput": throughput.throughput,
    "idle": latency.idle,
    "latency": latency.loaded,
    "paced": paced.paced,
    "history": variants.history,
    "snapshot": variants.snapshot,
    "hanging": variants.hanging,
    "instances": variants.instances,
    "backlog": variants.backlog,
    "statistics": statistics.statistics,
    "sweep": sweep.sweep,
    "live": live.live,
    "single": ingest.single,
    "batch": ingest.batch,
    "fan-out": fan_out.fan_out,
}
SHORTEST_HISTORY = history.SUBSCRIPTIONS * history.FEW_LETTERS
NEWEST = 99  # major version of PostgreSQL
# Long enough to write a history of ten million sagas.
ROUND_TIMEOUT_SECONDS = 3600


@dataclass
class Outcome:
    """The numbers of one measure, and why it stopped early."""

    rounds: list[Numbers] = field(default_factory=list)
    other_loads: list[OtherLoad] = field(default_factory=list)  # of each round
    failure: str | None = None

    @property
    def busy_rounds(self) -> list[int]:
        """The numbers, from 1, of the rounds during which the machine was not idle."""
        return [number for number, load in enumerate(self.other_loads, 1) if not load.is_idle]


def main() -> int:
    """Run the benchmarks. Returns the exit status."""
    given = arguments()
    scale = QUICK if given.quick else Scale()
    if given.history is not None:
        scale = dataclasses.replace(scale, history=given.history)
    rounds = given.rounds or (1 if given.quick else 5)
    # SIGTERM ends the children as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return uvloop.run(run(given.only or list(MEASURES), rounds, scale, given.output, given.postgres))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--rounds", type=positive, help="rounds of each measure (default: 5; with --quick 1)")
    parser.add_argument(
        "--only",
        nargs="+",
        choices=MEASURES,
        metavar="NAME",
        help=f"run only these measures: {', '.join(MEASURES)}",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small numbers, for a first try: about three minutes"
    )
    parser.add_argument(
        "--history",
        type=history_size,
        help="finished deliveries in the long history (default: 1 million)",
    )
    parser.add_argument(
        "--postgres",
        type=installation,
        default=installation_near(NEWEST),
        metavar="MAJOR",
        help="major version of PostgreSQL, such as 15 or 18 (default: the newest found)",
    )
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("bench-results"),
        help="folder for the results (default: bench-results)",
    )
    return parser.parse_args()


def positive(text: str) -> int:
    """Parse a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return number


def installation(text: str) -> Installation:
    """Find the PostgreSQL of this major version, on this machine or in the wheel."""
    try:
        return installation_of(positive(text))
    except LookupError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def history_size(text: str) -> int:
    """Parse a size that tests/support/history.py can divide among its subscriptions."""
    number = positive(text)
    if number < SHORTEST_HISTORY:
        raise argparse.ArgumentTypeError(f"must be at least {SHORTEST_HISTORY}")
    return number


async def run(names: Sequence[str], rounds: int, scale: Scale, folder: Path, postgres: Installation) -> int:
    """Run all rounds of each measure and write the results. Returns the exit status."""
    outcomes: dict[str, Outcome] = {}
    async with open_bed(scale, postgres) as bed:
        found = machine.facts(bed.server.version, bed.receiver.name)
        print(machine.caption(found), flush=True)
        for name in names:
            outcomes[name] = await outcome_of(name, bed, rounds)
        missing = bed.missing
    all_lines = [
        line
        for name, outcome in outcomes.items()
        for line in lines(
            ROWS[name], outcome.rounds, missing, outcome.failure, disturbed=bool(outcome.busy_rounds)
        )
    ]
    footnotes = f"{idle_note(outcomes)}{notes(scale)}"
    write(folder, all_lines, found, scale, outcomes, footnotes)
    print(f"\n{plain_table(all_lines)}\n\n{footnotes}\nWritten to {folder}/")
    return 1 if any(outcome.failure for outcome in outcomes.values()) else 0


async def outcome_of(name: str, bed: Bed, rounds: int) -> Outcome:
    """Run the rounds of one measure, up to the first that fails."""
    outcome = Outcome()
    for number in range(rounds):
        started = time.monotonic()
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_SECONDS), watching() as watch:
                numbers = await MEASURES[name](bed, number)
                load = watch.load()
        except Exception as error:  # the other measures still run
            outcome.failure = failure_text(error)
            print(f"{name} {number + 1}/{rounds}: {outcome.failure}", file=sys.stderr, flush=True)
            break
        outcome.rounds.append(numbers)
        outcome.other_loads.append(load)
        mark = "" if load.is_idle else f", not idle: {load}"
        text = ", ".join(f"{key} {value:.5g}" for key, value in numbers.items())
        print(f"{name} {number + 1}/{rounds} ({time.monotonic() - started:.0f} s{mark}): {text}", flush=True)
    return outcome


def failure_text(error: Exception) -> str:
    """One short line for a cell of the table."""
    words = [type(error).__name__, *str(error).strip().splitlines()[:1]]
    return f"failed: {': '.join(words)}"[:200]


def idle_note(outcomes: Mapping[str, Outcome]) -> str:
    """The footnote of marked lines; empty if the machine was idle in all rounds."""
    busy = {name: outcome.busy_rounds for name, outcome in outcomes.items() if outcome.busy_rounds}
    if not busy:
        return ""
    loads = [load for outcome in outcomes.values() for load in outcome.other_loads]
    rounds = "; ".join(f"{name}: {', '.join(map(str, numbers))}" for name, numbers in busy.items())
    return (
        f"{DISTURBED} The machine was not idle in these rounds ({rounds}): other processes used more than "
        f"{MEAN_LIMIT_CORES:g} cores on average or {WINDOW_LIMIT_CORES:g} for {WINDOW_SECONDS:g} s, at most "
        f"{max(load.mean_cores for load in loads):.2f} and {max(load.peak_cores for load in loads):.2f}.\n"
    )


def notes(scale: Scale) -> str:
    """Explains the table."""
    return (
        f"webhookd runs as one instance with default settings and {SUBSCRIPTIONS} event types with one "
        "subscription each. Rates count from the commit of all work to the completion of the last piece, "
        "with warm processes. The spread is the minimum and maximum of the rounds; a ratio compares the two "
        f"sides of the same round. The long history has {scale.history:,} finished deliveries, the long "
        f"backlog {scale.backlog:,} events. WAL is everything that the server wrote from before publishing "
        "to the end, including events, payloads and indexes. Processor time is per delivery, from the commit "
        "to the end, of all processes: those of the contender, then those of PostgreSQL. Arrival "
        "times under load come from the receiver: nginx reports whole milliseconds."
    )


def write(
    folder: Path,
    all_lines: Sequence[Line],
    found: dict[str, str | int],
    scale: Scale,
    outcomes: dict[str, Outcome],
    footnotes: str,
) -> None:
    """Write the table as text and Markdown, all numbers as JSON, and the chart."""
    folder.mkdir(parents=True, exist_ok=True)
    caption = machine.caption(found)
    (folder / "table.txt").write_text(f"{caption}\n\n{plain_table(all_lines)}\n\n{footnotes}\n")
    (folder / "table.md").write_text(f"{markdown_table(all_lines)}\n\n{caption} {footnotes}\n")
    raw = {
        "machine": found,
        "scale": dataclasses.asdict(scale),
        "measures": {
            name: dataclasses.asdict(outcome) | {"rounds_not_idle": outcome.busy_rounds}
            for name, outcome in outcomes.items()
        },
    }
    (folder / "results.json").write_text(json.dumps(raw, indent=2) + "\n")
    plot.draw(all_lines, caption, folder / "results.png")


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
