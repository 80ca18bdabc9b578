"""The table of bad inputs is complete, and the tests that it names exist."""

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.bad_inputs import ROWS

ROOT = Path(__file__).parent.parent
# The numbers of the list; the missing ones were dropped from it.
NUMBERS = {
    "A": "1-6 8-11 13 15 16 18 19 21-25 29-31 33 34 36 38-45",
    "B": "1-5 7-10 12 14 15 17-27 29 30",
    "C": "1-5 7 8 10-12 14-17 19-23",
    "D": "1-4 6-8 10-13 16",
    "F": "1 3-9 11-13 15 16",
    "G": "1 2 4-6 8 9 11 12",
}
REASON = "Differs: "


def rows() -> list[str]:
    """Return every row of the list, in order."""
    found = []
    for part, numbers in NUMBERS.items():
        for span in numbers.split():
            first, _, last = span.partition("-")
            found += [f"{part}{number}" for number in range(int(first), int(last or first) + 1)]
    return found


@cache
def names_in(path: str) -> set[str]:
    """Return the names of a file's test functions."""
    tree = ast.parse((ROOT / path).read_text())
    return {
        node.name
        for node in tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test_")
    }


def test_table_has_every_row() -> None:
    """The table has exactly the rows of the list, in its order."""
    assert list(ROWS) == rows()


@pytest.mark.parametrize("row", ROWS)
def test_row_has_existing_tests_or_a_reason(row: str) -> None:
    """A renamed test and an empty reason are found here."""
    assert ROWS[row]
    for entry in ROWS[row]:
        if entry.startswith(REASON):
            assert entry.endswith(".")
            continue
        path, _, name = entry.partition("::")
        assert name in names_in(path)
