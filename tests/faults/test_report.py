"""The report: what a person reads of a run."""

from pathlib import Path
from typing import Any

from tests.faults.__main__ import succeeded
from tests.faults.bed import Bed, Recovery
from tests.faults.performance import Result
from tests.faults.plan import Needs
from tests.faults.report import line, recovery_table, table, totals, write
from tests.faults.scenarios import ALL

HELD = Result(
    "kill",
    7,
    1,
    15,
    seconds=12.3,
    events=1200,
    faults=2,
    effects={"leases_expired": 3, "requests_doubled": 2, "duplicates_by_lease": 2},
    recoveries=[Recovery("death", 5.0, 7.5), Recovery("death", 8.0, 7.5)],
    resident_mebibytes=70,
)
FAILED = Result("freeze", 7, 1, 15, problems=["I1 something is missing"], folder="/somewhere")
MISSING = Result("clocks", 7, 1, 15, missing="libfaketime is not installed")


def test_a_failure_says_how_to_see_it_again() -> None:
    """Its seed, its name and where its logs are."""
    text = line(FAILED)
    assert "FAILED" in text
    assert "--seed 7 --only freeze --rounds 1 --postgres 15" in text
    assert "/somewhere" in text
    assert "I1 something is missing" in text


def test_what_was_not_run_says_so() -> None:
    """It is neither held nor failed."""
    assert line(MISSING) == "clocks: not run: libfaketime is not installed"


def test_what_was_not_run_fails_a_run_unless_it_may() -> None:
    """A machine without libfaketime has not shown what it did not try."""
    assert not succeeded([HELD, MISSING], allow_missing=False)
    assert succeeded([HELD, MISSING], allow_missing=True)
    assert not succeeded([HELD, FAILED], allow_missing=True)


def test_recoveries_are_measured_by_their_promise() -> None:
    """The longest counts, and a look and a reaper's pass are allowed beside what is promised."""
    assert recovery_table([HELD])[2] == "| death | 2 | 8.00 | 8.00 | 7.5 | kept |"
    late = Result("kill", 7, 1, 15, recoveries=[*HELD.recoveries, Recovery("death", 8.3, 7.5)])
    assert recovery_table([late])[2] == "| death | 3 | 8.00 | 8.30 | 7.5 | missed |"


async def test_a_recovery_that_is_late_fails_its_scenario(tmp_path: Path) -> None:
    """What is kept of it is a row; what is not is a problem."""
    nothing: Any = None  # of it is running
    bed = Bed(tmp_path, Needs(), nothing, nothing, nothing, nothing, nothing, nothing)
    bed.recovered("the return", 1.0, 10.0, ended=11.0)
    assert not bed.problems
    bed.recovered("the return", 1.0, 10.0, ended=12.0)
    assert [recovery.is_late for recovery in bed.recoveries] == [False, True]
    assert bed.problems == ["late: the return after 11.00 s, and not 10.0"]


def test_a_run_of_everything_says_whether_it_was_large_enough() -> None:
    """One of a part says nothing of it."""
    everything = [Result(name, 7, 1, 15, events=4000, faults=10) for name in ALL]
    assert "100,000 events: reached; 500 faults: NOT reached; not run: none" in totals(everything)
    assert "reached" not in totals(everything[1:])


def test_all_is_added_up_and_written(tmp_path: Path) -> None:
    """With every duplicate's cause; what did not run counts nowhere."""
    assert "2 scenarios, 1 failed; 1,200 events, 2 faults; 2 duplicates: 2 by a lease" in totals(
        [HELD, FAILED, MISSING]
    )
    assert "3 leases expired | 2 / 0 |" in table([HELD], ALL)[-1]
    write(tmp_path, [HELD, MISSING], ALL)
    assert {path.name for path in tmp_path.iterdir()} == {"faults.txt", "faults.md", "faults.jsonl"}
