"""Where the tests find PostgreSQL, and how --postgres chooses."""

from collections.abc import Iterator

import pytest

from tests.support import sources
from tests.support.postgres import ExistingServer
from tests.support.sources import Source, SourceError, one_for_each_major, select


def source(major: int, origin: str) -> Source:
    """Make a source that no test starts."""
    return Source(major, origin, lambda: ExistingServer(major, ""))


FOUND = [source(16, "PATH"), source(18, "wheel"), source(16, "wheel"), source(15, "Docker")]


def find() -> Iterator[Source]:
    """Find the sources of a made-up machine."""
    yield from FOUND


def test_first_source_is_the_default() -> None:
    """The order of the sources decides, not the version."""
    assert select([], find) == [FOUND[0]]


def test_major_comes_from_its_first_source() -> None:
    """A requested major is taken from the most preferred source that has it."""
    assert select(["16"], find) == [FOUND[0]]


def test_majors_may_be_repeated_and_listed() -> None:
    """Repeated options and comma-separated lists mean the same, once each."""
    assert select(["18,16", "16"], find) == [FOUND[0], FOUND[1]]


def test_all_means_each_major_once_oldest_first() -> None:
    """`all` gives one source for each major that is found."""
    assert select(["all"], find) == [FOUND[3], FOUND[0], FOUND[1]]


def test_missing_major_is_an_error_of_one_line() -> None:
    """The error names the requested major and the available ones."""
    with pytest.raises(SourceError) as caught:
        select(["17"], find)
    assert str(caught.value) == (
        "PostgreSQL 17 was not found; found: 16 (PATH), 18 (wheel), 16 (wheel), 15 (Docker);"
        " supported: 15, 16, 17, 18"
    )


def test_invalid_value_is_an_error() -> None:
    """A value must be a number or `all`."""
    with pytest.raises(SourceError, match="--postgres=newest"):
        select(["newest"], find)


def test_search_stops_at_the_first_match() -> None:
    """Later sources, of which Docker is slow, are not checked."""

    def find_then_fail() -> Iterator[Source]:
        yield FOUND[0]
        raise AssertionError("looked further")

    assert select(["16"], find_then_fail) == [FOUND[0]]


def test_no_source_is_an_error() -> None:
    """Without any PostgreSQL, every request is an error."""
    for wanted in ([], ["all"], ["15"]):
        with pytest.raises(SourceError, match="found: none"):
            select(wanted, list)


def test_unreachable_existing_server_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong WEBHOOKD_TEST_DSN ends the run instead of using another source."""
    monkeypatch.setenv(sources.DSN_VARIABLE, "postgresql://nobody@127.0.0.1:1/postgres")
    with pytest.raises(SourceError, match="WEBHOOKD_TEST_DSN is set, but connecting failed"):
        select([])


def test_existing_server_is_preferred(monkeypatch: pytest.MonkeyPatch) -> None:
    """WEBHOOKD_TEST_DSN is preferred to everything on the machine."""

    async def major_of_the_existing_server(dsn: str) -> int:
        assert dsn == "postgresql://existing"
        return 17

    monkeypatch.setenv(sources.DSN_VARIABLE, "postgresql://existing")
    monkeypatch.setattr(sources, "server_major", major_of_the_existing_server)
    [chosen] = select([])
    assert (chosen.major, chosen.origin) == (17, sources.DSN_VARIABLE)


def test_unsupported_version_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """An older version than the supported ones is not used, even if it is found first."""
    monkeypatch.setattr(sources, "all_sources", lambda: iter([source(14, "PATH"), FOUND[0]]))
    assert one_for_each_major(sources.sources()) == [FOUND[0]]
