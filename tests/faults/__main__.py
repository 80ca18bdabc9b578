"""`make faults`: every scenario once, then a random mix; prints a line for each, and a table at the end."""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults.performance import Result, perform
from tests.faults.report import line, write
from tests.faults.scenarios import ALL
from tests.support.installations import installation_near


def main() -> int:
    """Run, print and write; the exit status."""
    given = arguments()
    # A terminated run ends its children just as an interrupted one.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return asyncio.run(run(given))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="of all that is random (a new one)")
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--rounds", type=int, help="of each scenario, instead of its own number")
    parser.add_argument("--postgres", type=int, default=15, help="the major (15)")
    parser.add_argument("--list", action="store_true", help="print the actions, and do nothing")
    parser.add_argument(
        "--allow-missing", action="store_true", help="do not fail for what this machine cannot run"
    )
    parser.add_argument("--output", type=Path, default=Path("faults-results"), help="folder (faults-results)")
    return parser.parse_args()


async def run(given: argparse.Namespace) -> int:
    """One scenario after the other."""
    seed = secrets.randbelow(10**6) if given.seed is None else given.seed
    names = given.only or list(ALL)
    if given.list:
        for name in names:
            for action in ALL[name].actions(seed, given.rounds):
                print(name, action)
        return 0
    installation = installation_near(given.postgres)
    print(f"PostgreSQL {installation.version}, --seed {seed}", flush=True)
    results: list[Result] = []
    for name in names:
        result = await perform(ALL[name], seed, installation, given.rounds)
        results.append(result)
        print(line(result), flush=True)
    write(given.output, results, ALL)
    return 0 if succeeded(results, allow_missing=given.allow_missing) else 1


def succeeded(results: Sequence[Result], *, allow_missing: bool) -> bool:
    """Nothing failed, and nothing was left out unless that is allowed."""
    return all(result.passed and (allow_missing or not result.missing) for result in results)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
