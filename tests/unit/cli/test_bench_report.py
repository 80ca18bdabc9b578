"""What a bench says of its figures: who was the limit, and sizes in words."""

import pytest

from webhookd.devtools.bench_processors import Processors, Sample, between
from webhookd.devtools.bench_report import Limit, limit, size


@pytest.mark.parametrize(
    ("daemon", "receiver", "machine", "who"),
    [
        (0.95, 0.3, 1.5, Limit.DAEMON),
        (0.5, 0.9, 1.5, Limit.RECEIVER),
        (0.9, 0.4, 1.9, Limit.MACHINE),
        (0.3, 0.1, 0.6, Limit.DATABASE),
    ],
)
def test_who_is_the_limit(daemon: float, receiver: float, machine: float, who: Limit) -> None:
    """Whoever has no time left; if all have, they wait for the database."""
    assert limit(Processors(daemon, receiver, None, machine, there_are=2)) is who


def test_no_samples_no_limit() -> None:
    """Where /proc is missing, or all was over at the first look, nothing is claimed."""
    sample = Sample(1.0, 1.0, 1.0, {}, 1.0)
    assert between(None, sample) is None
    assert between(sample, sample) is None
    assert limit(None) is Limit.UNKNOWN


def test_processors_between_samples() -> None:
    """Seconds taken by seconds passed; a server's process that is new took all of it since."""
    taken = between(Sample(0.0, 1.0, 2.0, {7: 5.0}, 10.0), Sample(2.0, 2.0, 2.5, {7: 5.5, 8: 0.5}, 13.0))
    assert taken is not None
    assert (taken.daemon, taken.receiver, taken.postgresql, taken.machine) == (0.5, 0.25, 0.5, 1.5)
    assert taken.others == 0.25


def test_sizes() -> None:
    """In the unit that leaves a few digits."""
    assert [size(it) for it in (7, 999, 2100, 5.2e9, 3e15)] == [
        "7 B",
        "999 B",
        "2.1 kB",
        "5.2 GB",
        "3000.0 TB",
    ]
