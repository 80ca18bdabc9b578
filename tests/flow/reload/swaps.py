"""Collects the settings that tests show to be reloadable; `test_keys` compares them with all settings."""

from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])

SWAPPED: set[str] = set()


def swaps(*keys: str) -> Callable[[Test], Test]:
    """Mark a test as proof that a reload applies these settings."""

    def note(test: Test) -> Test:
        SWAPPED.update(keys)
        return test

    return note
