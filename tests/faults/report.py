"""Results as text: a line for each scenario, and the tables at the end."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.bed import ALLOWANCE_SECONDS, Recovery
from tests.faults.performance import Result
from tests.faults.plan import Scenario
from tests.faults.scenarios import ALL

# What a run of every scenario has to have at least.
GOAL_EVENTS = 100_000
GOAL_FAULTS = 500


def line(result: Result) -> str:
    """What became of one."""
    if result.missing:
        return f"{result.scenario}: not run: {result.missing}"
    effects = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result.effects.items())
    text = (
        f"{result.scenario}: {'held' if result.passed else 'FAILED'}, {result.seconds:.0f} s, "
        f"{result.events} events, {result.faults} faults; {effects}"
    )
    for problem in result.problems:
        text += f"\n  {problem}"
    if result.folder:
        again = f"--seed {result.seed} --only {result.scenario} --rounds {result.rounds}"
        text += f"\n  again: FAULTS='{again} --postgres {result.major}'; its logs: {result.folder}"
    return text


def table(results: Sequence[Result], scenarios: Mapping[str, Scenario]) -> list[str]:
    """A row for each that ran."""
    lines = [
        "| scenario | what is broken | what held | events | faults | effects | doubled by lease, answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        scenario = scenarios[result.scenario]
        told = result.missing or ", ".join(
            f"{count} {name.replace('_', ' ')}" for name, count in shown(result.effects).items()
        )
        doubled = [result.effects.get(f"duplicates_by_{cause}", 0) for cause in ("lease", "lost_answer")]
        lines.append(
            f"| `{result.scenario}` | {scenario.breaks} | {scenario.holds} | {result.events:,} |"
            f" {result.faults} | {told} | {doubled[0]} / {doubled[1]} |"
        )
    return lines


def shown(effects: Mapping[str, int]) -> dict[str, int]:
    """Without what other columns tell, and what is the load and not an effect."""
    hidden = ("duplicates_", "deliveries", "requests_doubled", "attempts_")
    return {name: count for name, count in effects.items() if not name.startswith(hidden)}


def totals(results: Sequence[Result]) -> str:
    """All together, and the recovery times as a table."""
    ran = [result for result in results if not result.missing]
    doubled = sum(result.effects.get("requests_doubled", 0) for result in ran)
    by_lease = sum(result.effects.get("duplicates_by_lease", 0) for result in ran)
    counts = (
        f"{len(ran)} scenarios, {sum(not result.passed for result in ran)} failed; "
        f"{sum(result.events for result in ran):,} events, {sum(result.faults for result in ran)} faults; "
        f"{doubled} duplicates: {by_lease} by a lease that expired, {doubled - by_lease} by a lost answer"
    )
    lines = [counts, *goals(results), "", *recovery_table(ran)]
    shares = [result.idle_share for result in ran if result.idle_share is not None]
    if shares:
        lines += ["", f"without a database an instance used {max(shares):.1%} of a processor at the most"]
    lines.append(
        f"the largest instance had {max((result.resident_mebibytes for result in ran), default=0)} MiB"
    )
    return "\n".join(lines)


def goals(results: Sequence[Result]) -> list[str]:
    """Whether a run of everything was as large as it has to be."""
    if {result.scenario for result in results} != set(ALL):
        return []
    missing = [result.scenario for result in results if result.missing]
    events, faults = sum(result.events for result in results), sum(result.faults for result in results)
    text = (
        f"{GOAL_EVENTS:,} events: {'reached' if events >= GOAL_EVENTS else 'NOT reached'}; "
        f"{GOAL_FAULTS} faults: {'reached' if faults >= GOAL_FAULTS else 'NOT reached'}; "
        f"not run: {', '.join(missing) or 'none'}"
    )
    return [text]


def recovery_table(results: Sequence[Result]) -> list[str]:
    """What was timed: how often, the median, the longest, and how long it may take."""
    found: dict[str, list[Recovery]] = {}
    for result in results:
        for recovery in result.recoveries:
            found.setdefault(recovery.what, []).append(recovery)
    lines = ["| recovery | times | median s | longest s | promised s | |", "|---|---|---|---|---|---|"]
    for what, recoveries in found.items():
        seconds = sorted(recovery.seconds for recovery in recoveries)
        median, longest = seconds[len(seconds) // 2], seconds[-1]
        mark = "missed" if any(recovery.is_late for recovery in recoveries) else "kept"
        bound = recoveries[0].bound_seconds
        lines.append(f"| {what} | {len(seconds)} | {median:.2f} | {longest:.2f} | {bound:.1f} | {mark} |")
    return [*lines, "", f"(measured from outside: {ALLOWANCE_SECONDS:.2f} s more than promised are kept)"]


def write(folder: Path, results: Sequence[Result], scenarios: Mapping[str, Scenario]) -> None:
    """All of it, for a person, for the README and for a program."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*(line(result) for result in results), "", totals(results)])
    (folder / "faults.txt").write_text(f"{text}\n")
    (folder / "faults.md").write_text("\n".join([*table(results, scenarios), "", totals(results)]) + "\n")
    (folder / "faults.jsonl").write_text("".join(f"{result.as_json()}\n" for result in results))
    print(f"\n{totals(results)}\nWritten to {folder}/")
