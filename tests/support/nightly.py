"""Which cases of a parametrized test wait for `make nightly`."""

from collections.abc import Iterable
from typing import Any

import pytest


def first_in_gate(cases: Iterable[Any]) -> list[Any]:
    """Mark every case except the first as nightly: the gate only has to show that the check can fail."""
    first, *others = cases
    return [first, *(marked_nightly(case) for case in others)]


def marked_nightly(case: Any) -> Any:
    """Return a case, which may be a `pytest.param`, with the marker."""
    if hasattr(case, "values") and hasattr(case, "marks"):
        return pytest.param(*case.values, id=case.id, marks=[*case.marks, pytest.mark.nightly])
    return pytest.param(case, marks=pytest.mark.nightly)
