"""The pages agree with the code, with each other and with the settings. Nothing is started here."""

import re
from pathlib import Path
from typing import get_args

import pytest

from tests.support import reference
from tests.support.pages import PAGES, README, ROOT, TRANSLATED, broken_links, fences
from webhookd.core.settings import Scope, Settings

TEST_COMMAND = "python3 tests/run.py\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    """Every link names a file of the repository and, after #, one of its headings."""
    assert broken_links(page) == []


@pytest.mark.parametrize("page", list(reference.pages()), ids=lambda page: page.name)
def test_generated_pages_are_up_to_date(page: Path) -> None:
    """Settings and commands are documented as they are in the code; `make docs` writes the pages."""
    assert page.read_text("utf-8") == reference.pages()[page]


def test_both_languages_have_the_same_structure() -> None:
    """The translated README has the same code blocks, headings, and number of table rows."""
    assert fences(TRANSLATED) == fences(README)
    for pattern in (r"^#+ ", r"^\|", r"^- "):
        in_both = [
            len(re.findall(pattern, page.read_text("utf-8"), re.MULTILINE)) for page in (README, TRANSLATED)
        ]
        assert in_both[0] == in_both[1], pattern


def test_readme_test_command_is_the_one_of_ci() -> None:
    """The README runs the tests as the continuous integration does."""
    assert ("sh", TEST_COMMAND) in fences(README)
    assert (ROOT / ".ci" / "run").read_text().endswith(f"exec {TEST_COMMAND}")


def test_make_targets_exist() -> None:
    """Every `make` command of a page is a target of the Makefile."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {name for page in PAGES for name in re.findall(r"`make ([a-z-]+)", page.read_text("utf-8"))}
    assert named
    assert named <= targets


def test_retry_schedule_follows_from_the_defaults() -> None:
    """The table of docs/concepts.md shows each attempt of the default policy, and when it is given up."""
    text = (ROOT / "docs" / "concepts.md").read_text("utf-8")
    schedule = re.findall(r"^\| (\d+) \| (.*?) ?\| (.+) \|$", text, re.MULTILINE)
    retry = Settings().retry
    expected, elapsed = [("1", "", "0")], 0.0
    for attempt in range(2, retry.max_attempts + 1):
        delay = _delay_seconds(attempt - 1)
        elapsed += delay
        expected.append((str(attempt), _duration(delay), _duration(elapsed)))
    assert schedule == expected
    for limit, given_up in re.findall(r"^\| (\d+) \| ([^|]+?) \|$", text, re.MULTILINE):
        assert given_up == _duration(sum(_delay_seconds(failures) for failures in range(1, int(limit))))


def test_roles_and_scopes_are_documented() -> None:
    """docs/roles.md has every role that the schema creates, and every scope of the API."""
    text = (ROOT / "docs" / "roles.md").read_text("utf-8")
    arrays = re.findall(r"array\[(.*?)\]", (ROOT / "schema" / "roles.sql").read_text("utf-8"), re.DOTALL)
    roles = set(re.findall(r"'(\w+)'", "".join(arrays)))
    assert roles
    missing = [name for name in (*roles, *get_args(Scope)) if f"| `{name}` |" not in text]
    assert missing == []


def test_named_source_files_exist() -> None:
    """docs/how-it-works.md names files and folders of the package and of the schema as they are."""
    text = (ROOT / "docs" / "how-it-works.md").read_text("utf-8")
    named = re.findall(r"`((?:\w+/)+(?:\w+\.(?:py|sql))?)`", text)
    assert named
    folders = (ROOT, ROOT / "webhookd")
    assert [name for name in named if not any((folder / name).exists() for folder in folders)] == []


def _delay_seconds(failures: int) -> float:
    retry = Settings().retry
    return min(retry.max_delay_seconds, retry.base_delay_seconds * 2.0 ** (failures - 1))


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    parts = ((hours, "h"), (minutes, "min"), (seconds, "s"))
    return " ".join(f"{number} {unit}" for number, unit in parts if number)
