"""The watch's verdict on /readyz answers, and the log lines of a killed instance."""

from pathlib import Path

import pytest

from tests.faults.instance import Instance
from tests.faults.watch import NO_DATABASE, OK, Observed, Probe
from tests.support.daemon import DaemonProcess


def observed(
    *statuses: int | str, because: str = NO_DATABASE, database_lost_at: float | None = 1.0
) -> Observed:
    """Return one probe per second, from 0 on; the database is lost at the second probe."""
    probes = [
        Probe(place, place + 0.1, status, () if status == OK else (because,))
        for place, status in enumerate(statuses)
    ]
    return Observed(probes, database_lost_at=database_lost_at)


@pytest.mark.parametrize(
    ("statuses", "wrong"),
    [
        ([200, 200, 503, 503], 0),
        ([503, 200, 503], 0),
        ([200, 503, 200, 503, 200], 2),
        ([200, 503, "TimeoutError", 503], 0),
        ([200, "TimeoutError", 200], 0),
    ],
)
def test_ready_after_unready_without_database_is_wrong(statuses: list[int | str], wrong: int) -> None:
    """An instance may answer 200 until its first 503; a probe without an answer does not count."""
    watched = observed(*statuses)
    watched.database_restored()
    assert len(watched.false_ready) == wrong
    assert watched.database_lost_at is None


def test_restarting_service_does_not_report_a_lost_database() -> None:
    """A 503 for another reason does not count as noticing the loss."""
    watched = observed(200, 503, 200, because="routing is failing")
    assert not watched.reported_unready()
    watched.database_restored()
    assert (watched.false_ready, watched.unready) == ([], 1)


def test_any_answer_is_correct_while_the_database_is_there() -> None:
    """Only a 503 counts as unready."""
    watched = observed(503, 200, "TimeoutError", 503, 200, database_lost_at=None)
    watched.database_restored()
    assert (watched.false_ready, watched.unready, watched.reported_unready()) == ([], 2, False)


def test_log_line_cut_off_by_a_kill_is_ignored(tmp_path: Path) -> None:
    """An incomplete line is ignored at a kill, but not elsewhere or at the end of the log."""
    daemon = DaemonProcess(tmp_path, "postgresql://nobody@127.0.0.1/nothing")
    instance = Instance(0, daemon, None, None)
    daemon.log_path.write_text("{1}\n{ha")
    instance._record_kill()
    with daemon.log_path.open("a") as log:
        log.write("{2}\nwords\n{3}\n{ha")
    assert list(instance.log_lines()) == ["{1}", "{2}", "words", "{3}", "{ha"]
