"""The rows of the benchmark's table: ratios, goals, and what is said where there are no numbers."""

import pytest

from tests.bench.__main__ import MEASURES, failure_text
from tests.bench.measures.turns import in_order
from tests.bench.rows import KILOBYTES, RATE, RATIO, ROWS, Row, at_least, at_most, lines
from tests.bench.summary import Summary, percentile, ratios, summarize
from tests.bench.table import markdown_table, plain_table

RATIO_ROW = Row("ours ÷ theirs", "ours", RATIO, "theirs", at_least(0.7))
ROUNDS = [{"ours": 70.0, "theirs": 100.0}, {"ours": 30.0, "theirs": 60.0}, {"ours": 90.0, "theirs": 100.0}]


def test_a_ratio_is_of_the_two_sides_of_one_round() -> None:
    """Its median is of the rounds' ratios: the ratio of the medians would be another."""
    assert ratios([70, 30, 90], [100, 60, 100]) == [0.7, 0.5, 0.9]
    [line] = lines([RATIO_ROW], ROUNDS, {})
    assert line.summary == Summary(0.7, 0.5, 0.9)
    with pytest.raises(ValueError, match="zip"):
        ratios([1], [1, 2])


def test_every_other_round_goes_backwards() -> None:
    """So that a side is not always the one that finds the machine warm."""
    assert [in_order(number, "abc") for number in range(3)] == [list("abc"), list("cba"), list("abc")]


def test_a_summary_is_the_median_and_the_ends() -> None:
    """Of an even number the median is between the middle two."""
    assert summarize([4, 1, 3, 2]) == Summary(2.5, 1, 4)


@pytest.mark.parametrize(("percent", "expected"), [(50, 50), (99, 99), (100, 100), (1, 1)])
def test_a_percentile_is_a_value_that_was_seen(percent: int, expected: int) -> None:
    """The nearest rank of 1 to 100 is the percentage itself, in whatever order they come."""
    assert percentile(list(range(100, 0, -1)), percent) == expected


def test_a_percentile_of_few_and_of_none() -> None:
    """Of two values the upper is every percentile past the half; of none there is none."""
    assert [percentile([7, 3], percent) for percent in (50, 51, 99)] == [3, 7, 7]
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@pytest.mark.parametrize(
    ("goal", "met", "missed"), [(at_least(0.7), 0.7, 0.69), (at_most(3.5), 3.5, 3.51)], ids=str
)
def test_a_goal_is_met_at_its_bound(goal: object, met: float, missed: float) -> None:
    """And missed past it, in the direction that is worse."""
    row = Row("number", "it", RATIO, goal=goal)  # type: ignore[arg-type]
    verdicts = [lines([row], [{"it": value}], {})[0].verdict for value in (met, missed)]
    assert verdicts == ["met", "missed"]


def test_a_unit_scales_a_number_and_leaves_a_ratio() -> None:
    """Bytes become kB before they are compared with the goal."""
    rows = [Row("WAL", "ours", KILOBYTES, goal=at_most(3.5)), Row("both", "ours", KILOBYTES, "theirs")]
    number, ratio = lines(rows, [{"ours": 3400.0, "theirs": 1700.0}], {})
    assert (number.summary, number.verdict) == (Summary(3.4, 3.4, 3.4), "met")
    assert ratio.summary == Summary(2, 2, 2)


def test_without_numbers_a_line_says_why() -> None:
    """A peer that is not installed, a measure that failed, and one that was never begun."""
    reasons = [
        lines([RATIO_ROW], rounds, missing, failure)[0].verdict
        for rounds, missing, failure in (
            ([{"ours": 1.0}], {"theirs": "not installed"}, None),
            ([], {}, "failed: TimeoutError"),
            ([], {}, None),
        )
    ]
    assert reasons == ["not installed", "failed: TimeoutError", "not measured"]


def test_a_failure_is_one_short_line() -> None:
    """Also where an error has no words, or many."""
    assert failure_text(TimeoutError()) == "failed: TimeoutError"
    assert failure_text(ValueError("first\nsecond")) == "failed: ValueError: first"
    assert len(failure_text(ValueError("x" * 1000))) == 200


def test_rounds_before_a_failure_count() -> None:
    """A failure in a later round takes nothing from what was measured."""
    [line] = lines([RATIO_ROW], ROUNDS[:1], {}, "failed: in round 2")
    assert line.summary == Summary(0.7, 0.7, 0.7)


def test_the_table_in_both_forms() -> None:
    """Columns stand under each other; Markdown has as many cells in each row."""
    rows = [RATIO_ROW, Row("theirs", "theirs", RATE), Row("peer", "peer", RATE)]
    found = lines(rows, [{"ours": 1500.0, "theirs": 1000.0}], {"peer": "not installed"})
    assert plain_table(found).splitlines() == [
        "measure          median          spread   goal",
        "ours ÷ theirs      1.50    1.50 to 1.50  ≥ 0.7  met",
        "theirs         1,000 /s  1,000 to 1,000",
        "peer                  —                         not installed",
    ]
    assert markdown_table(found).splitlines()[2:] == [
        "| ours ÷ theirs | 1.50 | 1.50 to 1.50 | ≥ 0.7 | met |",
        "| theirs | 1,000 /s | 1,000 to 1,000 |  |  |",
        "| peer | — |  |  | not installed |",
    ]


def test_every_measure_has_rows_with_names_of_their_own() -> None:
    """Two rows of one name in a measure could not be told apart in the table or the picture."""
    assert set(ROWS) == set(MEASURES)
    for rows in ROWS.values():
        assert len({row.label for row in rows}) == len(rows)
