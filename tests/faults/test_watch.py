"""The watch and an instance's log: what is held against an instance, and what is not."""

from pathlib import Path

import pytest

from tests.faults.instance import Instance
from tests.faults.watch import NO_DATABASE, OK, Look, Seen
from tests.support.daemon import DaemonProcess


def seen(*statuses: int | str, because: str = NO_DATABASE, away_since: float | None = 1.0) -> Seen:
    """A look a second, from 0 on; the database is away from the second one."""
    looks = [
        Look(place, place + 0.1, status, () if status == OK else (because,))
        for place, status in enumerate(statuses)
    ]
    return Seen(looks, away_since=away_since)


@pytest.mark.parametrize(
    ("statuses", "untruths"),
    [
        ([200, 200, 503, 503], 0),
        ([503, 200, 503], 0),
        ([200, 503, 200, 503, 200], 2),
        ([200, 503, "TimeoutError", 503], 0),
        ([200, "TimeoutError", 200], 0),
    ],
)
def test_ready_after_unready_without_a_database_is_no_truth(statuses: list[int | str], untruths: int) -> None:
    """Before it noticed it may say 200; a look that got no answer is neither."""
    watched = seen(*statuses)
    watched.judge()
    assert len(watched.untruths) == untruths
    assert watched.away_since is None


def test_a_service_that_begins_anew_says_nothing_of_the_database() -> None:
    """It has not noticed yet, and is not said to have."""
    watched = seen(200, 503, 200, because="routing is failing")
    assert not watched.said_unready()
    watched.judge()
    assert (watched.untruths, watched.unready) == ([], 1)


def test_with_a_database_it_may_say_what_it_likes() -> None:
    """And only a 503 is one."""
    watched = seen(503, 200, "TimeoutError", 503, 200, away_since=None)
    watched.judge()
    assert (watched.untruths, watched.unready, watched.said_unready()) == ([], 2, False)


def test_what_a_kill_left_of_a_line_is_no_line(tmp_path: Path) -> None:
    """Half a line at the end of a life is passed over; within one, or at the last end, it is told."""
    daemon = DaemonProcess(tmp_path, "postgresql://nobody@127.0.0.1/nothing")
    instance = Instance(0, daemon, None, None)
    daemon.log_path.write_text("{1}\n{ha")
    instance._note_cut()
    with daemon.log_path.open("a") as log:
        log.write("{2}\nwords\n{3}\n{ha")
    assert list(instance.lines()) == ["{1}", "{2}", "words", "{3}", "{ha"]
