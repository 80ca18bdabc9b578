"""Results as text: a paragraph per scenario, and the tables of a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.bed import TOLERANCE_SECONDS, Recovery
from tests.faults.plan import Scenario
from tests.faults.runner import Result
from tests.faults.scenarios import ALL

# The minimum for a run of every scenario.
GOAL_EVENTS = 100_000
GOAL_FAULTS = 500


def result_text(result: Result) -> str:
    """Return the outcome of one scenario; after a failure, also how to repeat it."""
    if result.missing:
        return f"{result.scenario}: not run: {result.missing}"
    text = (
        f"{result.scenario}: {'passed' if result.passed else 'FAILED'}, {result.seconds:.0f} s, "
        f"{result.events} events, {result.faults} faults; {effects_text(result.effects)}"
    )
    for problem in result.problems:
        text += f"\n  {problem}"
    if result.folder:
        options = f"--seed {result.seed} --only {result.scenario} --rounds {result.rounds}"
        text += f"\n  repeat with FAULTS='{options} --postgres {result.major}'; logs: {result.folder}"
    return text


def effects_text(effects: Mapping[str, int]) -> str:
    """Return the effects as a list for a reader."""
    return ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in effects.items())


def table(results: Sequence[Result], scenarios: Mapping[str, Scenario]) -> list[str]:
    """Return a Markdown table with a row per scenario."""
    lines = [
        "| scenario | fault | expected | events | faults | effects | duplicates by lease / lost answer |",
        "|---|---|---|---|---|---|---|",
    ]
    for result in results:
        scenario = scenarios[result.scenario]
        effects = result.missing or effects_text(shown(result.effects))
        duplicates = [result.effects.get(f"duplicates_by_{cause}", 0) for cause in ("lease", "lost_answer")]
        lines.append(
            f"| `{result.scenario}` | {scenario.breaks} | {scenario.holds} | {result.events:,} |"
            f" {result.faults} | {effects} | {duplicates[0]} / {duplicates[1]} |"
        )
    return lines


def shown(effects: Mapping[str, int]) -> dict[str, int]:
    """Remove effects that other columns show, and counts of the load that are not effects."""
    hidden = ("duplicates_", "deliveries", "duplicate_requests", "attempts_")
    return {name: count for name, count in effects.items() if not name.startswith(hidden)}


def totals(results: Sequence[Result]) -> str:
    """Return the sums of a run and the table of recovery times."""
    ran = [result for result in results if not result.missing]
    duplicates = sum(result.effects.get("duplicate_requests", 0) for result in ran)
    by_lease = sum(result.effects.get("duplicates_by_lease", 0) for result in ran)
    counts = (
        f"{len(ran)} scenarios, {sum(not result.passed for result in ran)} failed; "
        f"{sum(result.events for result in ran):,} events, {sum(result.faults for result in ran)} faults; "
        f"{duplicates} duplicates: {by_lease} after an expired lease, "
        f"{duplicates - by_lease} after a lost answer"
    )
    lines = [counts, *goals(results), "", *recovery_table(ran)]
    shares = [result.idle_share for result in ran if result.idle_share is not None]
    if shares:
        lines += ["", f"maximum CPU use of an instance without a database: {max(shares):.1%}"]
    largest = max((result.resident_mebibytes for result in ran), default=0)
    lines.append(f"maximum memory of an instance: {largest} MiB")
    return "\n".join(lines)


def goals(results: Sequence[Result]) -> list[str]:
    """Return whether a run of all scenarios had enough events and faults."""
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
    """Return a Markdown table of recovery times: count, median, maximum and limit."""
    found: dict[str, list[Recovery]] = {}
    for result in results:
        for recovery in result.recoveries:
            found.setdefault(recovery.name, []).append(recovery)
    lines = ["| recovery | count | median s | maximum s | limit s | |", "|---|---|---|---|---|---|"]
    for name, recoveries in found.items():
        seconds = sorted(recovery.seconds for recovery in recoveries)
        median, longest = seconds[len(seconds) // 2], seconds[-1]
        mark = "exceeded" if any(recovery.is_late for recovery in recoveries) else "met"
        limit = recoveries[0].limit_seconds
        lines.append(f"| {name} | {len(seconds)} | {median:.2f} | {longest:.2f} | {limit:.1f} | {mark} |")
    return [*lines, "", f"(measured from outside: up to {TOLERANCE_SECONDS:.2f} s over the limit is met)"]


def write(folder: Path, results: Sequence[Result], scenarios: Mapping[str, Scenario]) -> None:
    """Write the results as text, as Markdown for the README and as JSON lines."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "\n".join([*(result_text(result) for result in results), "", totals(results)])
    (folder / "faults.txt").write_text(f"{text}\n")
    (folder / "faults.md").write_text("\n".join([*table(results, scenarios), "", totals(results)]) + "\n")
    (folder / "faults.jsonl").write_text("".join(f"{result.as_json()}\n" for result in results))
    print(f"\n{totals(results)}\nWritten to {folder}/")
