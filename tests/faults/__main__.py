"""`make faults`: run every scenario once, the random mix last; print a line per scenario and a summary."""

import argparse
import asyncio
import contextlib
import secrets
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.faults.report import result_text, write
from tests.faults.runner import Result, run_scenario
from tests.faults.scenarios import ALL
from tests.support.installations import installation_near


def main() -> int:
    """Run the scenarios and return the exit status."""
    options = parse_arguments()
    # SIGTERM must stop the child processes as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return asyncio.run(run(options))
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return 130


def parse_arguments() -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("--seed", type=int, help="seed of all random choices (default: a new seed)")
    parser.add_argument("--only", nargs="+", choices=ALL, metavar="NAME", help=", ".join(ALL))
    parser.add_argument("--rounds", type=int, help="rounds per scenario (default: each scenario's own)")
    parser.add_argument("--postgres", type=int, default=15, help="PostgreSQL major version (default: 15)")
    parser.add_argument("--list", action="store_true", help="print the actions without running them")
    parser.add_argument(
        "--allow-missing", action="store_true", help="do not fail if this machine cannot run a scenario"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("faults-results"), help="result folder (default: faults-results)"
    )
    return parser.parse_args()


async def run(options: argparse.Namespace) -> int:
    """Run the chosen scenarios one at a time."""
    seed = secrets.randbelow(10**6) if options.seed is None else options.seed
    names = options.only or list(ALL)
    if options.list:
        for name in names:
            for action in ALL[name].actions(seed, options.rounds):
                print(name, action)
        return 0
    installation = installation_near(options.postgres)
    print(f"PostgreSQL {installation.version}, --seed {seed}", flush=True)
    results: list[Result] = []
    for name in names:
        result = await run_scenario(ALL[name], seed, installation, options.rounds)
        results.append(result)
        print(result_text(result), flush=True)
    write(options.output, results, ALL)
    return 0 if succeeded(results, allow_missing=options.allow_missing) else 1


def succeeded(results: Sequence[Result], *, allow_missing: bool) -> bool:
    """Return True if no scenario failed, and none was skipped unless that is allowed."""
    return all(result.passed and (allow_missing or not result.missing) for result in results)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):
        sys.exit(main())
