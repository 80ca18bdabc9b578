"""Where a PostgreSQL for the tests comes from, in order of preference.

Reads WEBHOOKD_TEST_DSN, this machine's installations, the embedded wheel and Docker; yields a Source for each
major version. `python -m tests.support.sources` prints them for tests/run.py.
"""

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from tests.support.installations import local_installations
from tests.support.postgres import (
    ContainerServer,
    ExistingServer,
    LocalServer,
    Server,
    run_apart,
    server_major,
)
from webhookd.embedded.installation import Installation, wheel_installations

SUPPORTED_MAJORS = (15, 16, 17, 18)
DSN_VARIABLE = "WEBHOOKD_TEST_DSN"
DOCKER_TIMEOUT_SECONDS = 5


class SourceError(Exception):
    """No suitable PostgreSQL was found; the message is one line."""


@dataclass(frozen=True)
class Source:
    """One PostgreSQL that the tests could use."""

    major: int
    origin: str
    make_server: Callable[[], Server] = field(repr=False)


def sources() -> Iterator[Source]:
    """Yield each source of a supported major version lazily, the preferred first."""
    for source in all_sources():
        if source.major in SUPPORTED_MAJORS:
            yield source


def all_sources() -> Iterator[Source]:
    """Yield each source, of any major version."""
    yield from existing_source()
    for installation in local_installations():
        yield installation_source(installation, str(installation.bin_folder))
    for installation in wheel_installations():
        yield installation_source(installation, "the embedded wheel")
    if docker_answers():
        for major in SUPPORTED_MAJORS:
            yield container_source(major)


def existing_source() -> Iterator[Source]:
    """Yield the server of WEBHOOKD_TEST_DSN, if that is set."""
    dsn = os.environ.get(DSN_VARIABLE)
    if not dsn:
        return
    try:
        major = run_apart(server_major(dsn))
    except Exception as error:
        raise SourceError(f"{DSN_VARIABLE} is set, but connecting failed: {error}") from error
    if major not in SUPPORTED_MAJORS:
        raise SourceError(f"{DSN_VARIABLE} is PostgreSQL {major}, which is not supported")
    yield Source(major, DSN_VARIABLE, lambda: ExistingServer(major, dsn))


def installation_source(installation: Installation, origin: str) -> Source:
    """Return a source that starts a server of an installation."""
    return Source(installation.major, origin, lambda: LocalServer(installation))


def container_source(major: int) -> Source:
    """Return a source that starts a container."""
    return Source(major, "Docker", lambda: ContainerServer(major))


def docker_answers() -> bool:
    """Whether a Docker engine is available."""
    try:
        # Imported here because most runs never need it.
        import docker  # noqa: PLC0415
    except ImportError:
        return False
    with warnings.catch_warnings():
        # Without an engine, the client does not close its socket.
        warnings.simplefilter("ignore", ResourceWarning)
        try:
            with contextlib.closing(docker.from_env(timeout=DOCKER_TIMEOUT_SECONDS)) as client:
                return bool(client.ping())
        except docker.errors.DockerException:
            return False


def first(found: Iterable[Source], major: int | None = None) -> Source:
    """Return the preferred source of a major, or of any."""
    seen: list[Source] = []
    for source in found:
        if major in (None, source.major):
            return source
        seen.append(source)
    wanted = f"PostgreSQL {major}" if major else "PostgreSQL"
    available = ", ".join(f"{source.major} ({source.origin})" for source in seen) or "none"
    raise SourceError(f"{wanted} was not found; found: {available}; supported: {majors_text()}")


def one_for_each_major(found: Iterable[Source]) -> list[Source]:
    """Return the preferred source of each major, the oldest first."""
    preferred: dict[int, Source] = {}
    for source in found:
        preferred.setdefault(source.major, source)
    return [preferred[major] for major in sorted(preferred)]


def select(wanted: Iterable[str], find: Callable[[], Iterable[Source]] = sources) -> list[Source]:
    """Return the sources for the values of --postgres: majors, lists of majors, or `all`."""
    words = [word.strip() for value in wanted for word in value.split(",") if word.strip()]
    if not words:
        return [first(find())]
    if "all" in words:
        return one_for_each_major(find()) or [first([])]
    if bad := [word for word in words if not word.isdecimal()]:
        raise SourceError(f"--postgres={bad[0]}: expected a major version or all")
    return [first(find(), major) for major in sorted({int(word) for word in words})]


def majors_text() -> str:
    """List the supported major versions for a message."""
    return ", ".join(str(major) for major in SUPPORTED_MAJORS)


def main() -> None:
    """Print the sources as JSON; only the existing server if WEBHOOKD_TEST_DSN is set."""
    found = [first(sources())] if os.environ.get(DSN_VARIABLE) else one_for_each_major(sources())
    print(json.dumps([{"major": source.major, "origin": source.origin} for source in found]))


if __name__ == "__main__":
    main()
