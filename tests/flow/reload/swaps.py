"""Which keys a reload swaps, as the tests say that prove it. `test_keys` holds this against all there are."""

from collections.abc import Callable
from typing import Any, TypeVar

Test = TypeVar("Test", bound=Callable[..., Any])

SWAPPED: set[str] = set()


def swaps(*keys: str) -> Callable[[Test], Test]:
    """Say of a test that it shows these keys to take effect at a reload."""

    def note(test: Test) -> Test:
        SWAPPED.update(keys)
        return test

    return note
