"""Tests of the report of `webhookd bench`: the limiting part, processor loads and sizes."""

import pytest

from webhookd.devtools.bench_report import Limit, limit, size
from webhookd.devtools.processes import Processors, Sample, between


@pytest.mark.parametrize(
    ("daemon", "receiver", "machine", "expected"),
    [
        (0.95, 0.3, 1.5, Limit.DAEMON),
        (0.5, 0.9, 1.5, Limit.RECEIVER),
        (0.9, 0.4, 1.9, Limit.MACHINE),
        (0.3, 0.1, 0.6, Limit.DATABASE),
    ],
)
def test_limit_is_the_saturated_part(daemon: float, receiver: float, machine: float, expected: Limit) -> None:
    """If no part is saturated, all wait for the database."""
    assert limit(Processors(daemon, receiver, None, machine, there_are=2)) is expected


def test_limit_is_unknown_without_samples() -> None:
    """Without /proc, or if everything was delivered before the second sample."""
    sample = Sample(1.0, 1.0, 1.0, {}, 1.0)
    assert between(None, sample) is None
    assert between(sample, sample) is None
    assert limit(None) is Limit.UNKNOWN


def test_processor_load_between_samples() -> None:
    """Processor seconds per second; a new process of the server used all of its time in between."""
    load = between(Sample(0.0, 1.0, 2.0, {7: 5.0}, 10.0), Sample(2.0, 2.0, 2.5, {7: 5.5, 8: 0.5}, 13.0))
    assert load is not None
    assert (load.daemon, load.receiver, load.postgresql, load.machine) == (0.5, 0.25, 0.5, 1.5)
    assert load.other_programs == 0.25


def test_sizes() -> None:
    """In the unit that leaves few digits."""
    assert [size(it) for it in (7, 999, 2100, 5.2e9, 3e15)] == [
        "7 B",
        "999 B",
        "2.1 kB",
        "5.2 GB",
        "3000.0 TB",
    ]
