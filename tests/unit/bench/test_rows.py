"""Tests of the benchmark's table: ratios, goals, and notes about missing numbers."""

import pytest

from tests.bench.__main__ import MEASURES, Outcome, failure_text, idle_note
from tests.bench.idleness import OtherLoad
from tests.bench.rows import (
    KILOBYTES,
    RATE,
    RATIO,
    ROWS,
    Row,
    Summary,
    at_least,
    at_most,
    lines,
    markdown_table,
    own_processor,
    plain_table,
    ratios,
    server_processor,
    summarize,
)
from tests.bench.scale import alternate

RATIO_ROW = Row("ours ÷ theirs", "ours", RATIO, "theirs", at_least(0.7))
ROUNDS = [{"ours": 70.0, "theirs": 100.0}, {"ours": 30.0, "theirs": 60.0}, {"ours": 90.0, "theirs": 100.0}]


def test_ratio_compares_the_sides_of_one_round() -> None:
    """The median of the ratios, which is not the ratio of the medians."""
    assert ratios([70, 30, 90], [100, 60, 100]) == [0.7, 0.5, 0.9]
    [line] = lines([RATIO_ROW], ROUNDS, {})
    assert line.summary == Summary(0.7, 0.5, 0.9)
    with pytest.raises(ValueError, match="zip"):
        ratios([1], [1, 2])


def test_every_second_round_is_reversed() -> None:
    """So that no side always runs on a warm machine."""
    assert [alternate(number, "abc") for number in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_summary_is_median_minimum_and_maximum() -> None:
    """The median of an even number of values is between the middle two."""
    assert summarize([4, 1, 3, 2]) == Summary(2.5, 1, 4)


@pytest.mark.parametrize(
    ("goal", "met", "missed"), [(at_least(0.7), 0.7, 0.69), (at_most(3.5), 3.5, 3.51)], ids=str
)
def test_goal_is_met_at_its_limit(goal: object, met: float, missed: float) -> None:
    """And missed beyond it."""
    row = Row("number", "it", RATIO, goal=goal)  # type: ignore[arg-type]
    verdicts = [lines([row], [{"it": value}], {})[0].verdict for value in (met, missed)]
    assert verdicts == ["met", "missed"]


def test_unit_scales_numbers_but_not_ratios() -> None:
    """Bytes become kB before the comparison with the goal."""
    rows = [Row("WAL", "ours", KILOBYTES, goal=at_most(3.5)), Row("both", "ours", KILOBYTES, "theirs")]
    number, ratio = lines(rows, [{"ours": 3400.0, "theirs": 1700.0}], {})
    assert (number.summary, number.verdict) == (Summary(3.4, 3.4, 3.4), "met")
    assert ratio.summary == Summary(2, 2, 2)


def test_line_without_numbers_has_a_reason() -> None:
    """A peer that is not installed, a failed measure, and a measure that did not run."""
    reasons = [
        lines([RATIO_ROW], rounds, missing, failure)[0].verdict
        for rounds, missing, failure in (
            ([{"ours": 1.0}], {"theirs": "not installed"}, None),
            ([], {}, "failed: TimeoutError"),
            ([], {}, None),
        )
    ]
    assert reasons == ["not installed", "failed: TimeoutError", "not measured"]


def test_failure_is_one_short_line() -> None:
    """Also if the error has no message, or a long one."""
    assert failure_text(TimeoutError()) == "failed: TimeoutError"
    assert failure_text(ValueError("first\nsecond")) == "failed: ValueError: first"
    assert len(failure_text(ValueError("x" * 1000))) == 200


def test_rounds_before_a_failure_count() -> None:
    """A failure in a later round does not discard earlier rounds."""
    [line] = lines([RATIO_ROW], ROUNDS[:1], {}, "failed: in round 2")
    assert line.summary == Summary(0.7, 0.7, 0.7)


def test_table_as_text_and_markdown() -> None:
    """Aligned columns; in Markdown every row has the same number of cells."""
    rows = [RATIO_ROW, *(Row(name, name, RATE, contender=True) for name in ("theirs", "peer"))]
    numbers = {"ours": 1500.0, "theirs": 1000.0, own_processor("theirs"): 85e-6}
    numbers |= {server_processor("theirs"): 120e-6}
    found = lines(rows, [numbers], {"peer": "not installed"})
    assert plain_table(found).splitlines() == [
        "measure          median          spread    processor   goal",
        "ours ÷ theirs      1.50    1.50 to 1.50               ≥ 0.7  met",
        "theirs         1,000 /s  1,000 to 1,000  85 + 120 µs",
        "peer                  —                                      not installed",
    ]
    assert markdown_table(found).splitlines()[2:] == [
        "| ours ÷ theirs | 1.50 | 1.50 to 1.50 |  | ≥ 0.7 | met |",
        "| theirs | 1,000 /s | 1,000 to 1,000 | 85 + 120 µs |  |  |",
        "| peer | — |  |  |  | not installed |",
    ]


def test_line_of_a_busy_machine_is_marked() -> None:
    """If it has numbers; its label for the chart stays the same."""
    rows = [RATIO_ROW, Row("peer", "peer", RATE)]
    marked, missing = lines(rows, ROUNDS, {"peer": "not installed"}, disturbed=True)
    assert marked.label == RATIO_ROW.label
    assert [text.split("  ")[0] for text in plain_table([marked, missing]).splitlines()[1:]] == [
        "ours ÷ theirs †",
        "peer",
    ]


def test_footnote_names_the_rounds_that_were_not_idle() -> None:
    """With the highest load; without such a round there is no footnote."""
    idle, busy = OtherLoad(0.02, 0.05), OtherLoad(0.35, 0.9)
    outcomes = {"throughput": Outcome([{}] * 3, [busy, idle, busy]), "idle": Outcome([{}], [idle])}
    assert "(throughput: 1, 3)" in idle_note(outcomes)
    assert "at most 0.35 and 0.90" in idle_note(outcomes)
    assert idle_note({"idle": outcomes["idle"]}) == ""


def test_contender_without_a_database_has_one_processor_time() -> None:
    """The medians of the rounds; a contender without numbers has none."""
    row = Row("bare", "bare", RATE, contender=True)
    rounds = [{"bare": 1.0, own_processor("bare"): it * 1e-6} for it in (80, 90, 400)]
    assert lines([row], rounds, {})[0].processor == "90 µs"
    assert lines([row], [{"bare": 1.0}], {})[0].processor == ""


def test_labels_of_a_measure_are_unique() -> None:
    """Rows with the same label could not be distinguished in the table or the chart."""
    assert set(ROWS) == set(MEASURES)
    for rows in ROWS.values():
        assert len({row.label for row in rows}) == len(rows)
