"""What pages show: text from outside as text, times, numbers, and JSON as it was published."""

import tracemalloc
from datetime import UTC, datetime, timedelta

import pytest
from markupsafe import Markup

from webhookd.console import html

NOW = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "now"),
        (5, "5 s ago"),
        (65, "1 min 5 s ago"),
        (3 * 86_400 + 4 * 3600 + 59, "3 d 4 h ago"),
        (-90, "in 1 min 30 s"),
    ],
)
def test_ago_uses_the_two_largest_units(seconds: float, text: str) -> None:
    """The text is relative; the tooltip and the attribute have the exact time."""
    at = NOW - timedelta(seconds=seconds)
    shown = html.ago(at.isoformat(), NOW)
    assert f">{text}</time>" in shown
    assert f'title="{at:%Y-%m-%d %H:%M:%S} UTC"' in shown


def test_visible_shows_deceptive_characters_as_code_points() -> None:
    """Markup is escaped, and characters that hide or reorder text are named."""
    shown = html.visible("<b>\u202eexe.\x00\x1b[31m\u200bend")
    assert isinstance(shown, Markup)
    assert "<b>" not in shown
    assert "&lt;b&gt;" in shown
    for code in ("U+202E", "U+0000", "U+001B", "U+200B"):
        assert f'<span class="code-point">{code}</span>' in shown
    assert not {"\u202e", "\x00", "\x1b", "\u200b"} & set(shown)


def test_visible_keeps_lines_and_other_scripts() -> None:
    """Line breaks, tabs, emoji, accents and right-to-left letters stay as they are."""
    text = "a\n\t\u05e9\u05dc\u05d5\u05dd \u0645\u0631\u062d\u0628\u0627 中文 😀 é"
    assert html.visible(text) == text


def test_pretty_json_keeps_numbers_and_strings() -> None:
    """Formatting changes white space only: no float, escape or key is written in another way."""
    text = '{"a":1.10,"b":12345678901234567890.125,"c":"\\u0041","a":2}'
    formatted = html.pretty_json(text)
    assert "".join(formatted.split()) == text
    assert "\n" in formatted
    assert html.pretty_json("not json") == "not json"
    deep = "[" * 5000 + "]" * 5000
    assert html.pretty_json(deep)


def test_pretty_json_of_a_deep_document_is_bounded() -> None:
    """A megabyte whose indented form would be 500 times as long is shown as it is, cut like any other."""
    deep = "[" * 490 + "0," * 500_000 + "0" + "]" * 490
    tracemalloc.start()
    try:
        shown = html.pretty_json(deep)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert shown.startswith("[[[")
    assert len(shown) == html.MAX_PAYLOAD_CHARACTERS + 1
    assert peak_bytes < 20 * 1024 * 1024
    wide = "[" + "0," * 500_000 + "0]"
    assert html.pretty_json(wide).startswith("[\n  0,\n")


@pytest.mark.parametrize(
    ("fraction", "text"),
    [
        (None, "—"),
        (0.0, "0 %"),
        (1.0, "100 %"),
        (0.99999, "99.9 %"),
        (0.9731, "97.3 %"),
    ],
)
def test_percent_never_rounds_up_to_all(fraction: float | None, text: str) -> None:
    """A single failure is not hidden by rounding."""
    assert html.percent(fraction) == text


def test_counts_and_durations() -> None:
    """A count that stopped at its bound says so."""
    assert html.count_up_to(9_999, 10_000) == "9,999"
    assert html.count_up_to(10_000, 10_000) == "10,000+"
    assert html.duration(0.25) == "250 ms"
    assert html.duration(0) == "0 s"
    assert html.short("x" * 300) == "x" * 200 + "…"
