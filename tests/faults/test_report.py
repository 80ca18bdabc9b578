"""The report of a run."""

from pathlib import Path
from typing import Any

from tests.faults.__main__ import succeeded
from tests.faults.bed import Bed, Recovery
from tests.faults.plan import Needs
from tests.faults.report import recovery_table, result_text, table, totals, write
from tests.faults.runner import Result
from tests.faults.scenarios import ALL

PASSED = Result(
    "kill",
    7,
    1,
    15,
    seconds=12.3,
    events=1200,
    faults=2,
    effects={"leases_expired": 3, "duplicate_requests": 2, "duplicates_by_lease": 2},
    recoveries=[Recovery("death", 5.0, 7.5), Recovery("death", 8.0, 7.5)],
    resident_mebibytes=70,
)
FAILED = Result("freeze", 7, 1, 15, problems=["I1 something is missing"], folder="/somewhere")
MISSING = Result("clocks", 7, 1, 15, missing="libfaketime is not installed")


def test_failure_shows_how_to_repeat_it() -> None:
    """The text has the seed, the scenario and the folder with the logs."""
    text = result_text(FAILED)
    assert "FAILED" in text
    assert "--seed 7 --only freeze --rounds 1 --postgres 15" in text
    assert "/somewhere" in text
    assert "I1 something is missing" in text


def test_scenario_that_did_not_run() -> None:
    """It is reported as neither passed nor failed."""
    assert result_text(MISSING) == "clocks: not run: libfaketime is not installed"


def test_missing_scenario_fails_the_run_unless_allowed() -> None:
    """A scenario that did not run proved nothing."""
    assert not succeeded([PASSED, MISSING], allow_missing=False)
    assert succeeded([PASSED, MISSING], allow_missing=True)
    assert not succeeded([PASSED, FAILED], allow_missing=True)


def test_recoveries_are_compared_with_their_limit() -> None:
    """The maximum counts; the tolerance is one probe interval and one interval of the reaper."""
    assert recovery_table([PASSED])[2] == "| death | 2 | 8.00 | 8.00 | 7.5 | met |"
    late = Result("kill", 7, 1, 15, recoveries=[*PASSED.recoveries, Recovery("death", 8.3, 7.5)])
    assert recovery_table([late])[2] == "| death | 3 | 8.00 | 8.30 | 7.5 | exceeded |"


async def test_late_recovery_fails_the_scenario(tmp_path: Path) -> None:
    """Every recovery is recorded; a late recovery is also a problem."""
    nothing: Any = None  # no process runs
    bed = Bed(tmp_path, Needs(), nothing, nothing, nothing, nothing, nothing, nothing)
    bed.record_recovery("database back", 1.0, 10.0, ended=11.0)
    assert not bed.problems
    bed.record_recovery("database back", 1.0, 10.0, ended=12.0)
    assert [recovery.is_late for recovery in bed.recoveries] == [False, True]
    assert bed.problems == ["late: database back after 11.00 s, limit 10.0 s"]


def test_full_run_reports_whether_goals_were_reached() -> None:
    """A run of some scenarios does not mention the goals."""
    full_run = [Result(name, 7, 1, 15, events=4000, faults=10) for name in ALL]
    assert "100,000 events: reached; 500 faults: NOT reached; not run: none" in totals(full_run)
    assert "reached" not in totals(full_run[1:])


def test_totals_and_result_files(tmp_path: Path) -> None:
    """The totals name the cause of duplicates, and exclude scenarios that did not run."""
    assert "2 scenarios, 1 failed; 1,200 events, 2 faults; 2 duplicates: 2 after an expired lease" in totals(
        [PASSED, FAILED, MISSING]
    )
    assert "3 leases expired | 2 / 0 |" in table([PASSED], ALL)[-1]
    write(tmp_path, [PASSED, MISSING], ALL)
    assert {path.name for path in tmp_path.iterdir()} == {"faults.txt", "faults.md", "faults.jsonl"}
