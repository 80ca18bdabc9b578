"""The Retry-After of an answer. Pure: two headers and a clock in, seconds or nothing out."""

import re
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

MAX_RETRY_AFTER_SECONDS = 31_536_000.0  # as the column's check
_SECONDS = re.compile(r"[0-9]{1,20}")


def retry_after_seconds(retry_after: str | None, date: str | None, now: datetime) -> float | None:
    """Both forms of RFC 9110, bounded; garbage counts as nothing.

    A time is measured against the endpoint's own `Date`, so that its clock and ours may differ.
    """
    if retry_after is None:
        return None
    text = retry_after.strip()
    if _SECONDS.fullmatch(text):
        return min(float(text), MAX_RETRY_AFTER_SECONDS)
    until = _time(text)
    if until is None:
        return None
    since = (_time(date) if date else None) or now
    return min(max((until - since).total_seconds(), 0.0), MAX_RETRY_AFTER_SECONDS)


def _time(text: str) -> datetime | None:
    try:
        parsed = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)
