"""Rests of a stage after a call that did little."""

import pytest

from webhookd.pacing import FEW, MAX_REST_SECONDS, rest_seconds


@pytest.mark.parametrize(
    ("done", "took_seconds", "rest"),
    [
        (1, 0.004, 0.004),
        (FEW - 1, 0.004, 0.004),
        (FEW, 0.004, 0.0),  # enough: again at once
        (0, 0.004, 0.0),  # nothing: it waits for a bell anyway
        (1, 10.0, MAX_REST_SECONDS),  # a stalled database does not make it sleep
    ],
)
def test_a_rest_is_for_few_and_bounded(done: int, took_seconds: float, rest: float) -> None:
    """As long as the call, where it did something and that was little."""
    assert rest_seconds(done, took_seconds) == pytest.approx(rest)
