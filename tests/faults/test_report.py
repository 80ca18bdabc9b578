"""The report: what a person reads of a run."""

from pathlib import Path

from tests.faults.bed import Recovery
from tests.faults.performance import Result
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
    assert "--seed 7 --only freeze" in text
    assert "/somewhere" in text
    assert "I1 something is missing" in text


def test_what_was_not_run_says_so() -> None:
    """It is neither held nor failed."""
    assert line(MISSING) == "clocks: not run: libfaketime is not installed"


def test_recoveries_are_measured_by_their_promise() -> None:
    """The longest counts."""
    assert recovery_table([HELD])[-1] == "| death | 2 | 8.00 | 8.00 | 7.5 | missed |"


def test_all_is_added_up_and_written(tmp_path: Path) -> None:
    """With every duplicate's cause; what did not run counts nowhere."""
    assert "2 scenarios, 1 failed; 1,200 events, 2 faults; 2 duplicates: 2 by a lease" in totals(
        [HELD, FAILED, MISSING]
    )
    assert "3 leases expired | 2 / 0 |" in table([HELD], ALL)[-1]
    write(tmp_path, [HELD, MISSING], ALL)
    assert {path.name for path in tmp_path.iterdir()} == {"faults.txt", "faults.md", "faults.jsonl"}
