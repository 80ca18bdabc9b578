"""Request types that several resources share: pages of a list, and a body that must be empty."""

from typing import Annotated, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType

from webhookd.db.paging import Page
from webhookd.http.fields import Id

Value = TypeVar("Value")

DEFAULT_LIMIT = 100
MAX_LIMIT = 1000


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """The body of a request that says everything by its path."""


class Paged(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """What every list takes."""

    limit: Annotated[int, Meta(ge=1, le=MAX_LIMIT, description="of a page")] = DEFAULT_LIMIT
    cursor: Annotated[Id, Meta(description="next_cursor of the page before")] | UnsetType = UNSET

    @property
    def page(self) -> Page:
        """One row more than asked for tells whether there is a next page."""
        return Page(self.limit + 1, given(self.cursor))


def given(value: Value | UnsetType) -> Value | None:
    """None for what was not given."""
    return None if isinstance(value, UnsetType) else value
