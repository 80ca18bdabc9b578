"""The command of `jobs work`: valid and invalid results in $WEBHOOKD_RESULT_FILE."""

import asyncio
from pathlib import Path

import pytest

from webhookd.jobqueue.cli.execution import CommandFailure, CommandSuccess, RunningCommand, _read

EXPECTED = (
    "WEBHOOKD_RESULT_FILE must contain one line of 1 to 2000 characters in UTF-8, without control characters"
)


async def run(script: str) -> CommandSuccess | CommandFailure:
    """The result of a shell command."""
    async with asyncio.timeout(20), RunningCommand(["sh", "-c", script], b"{}", {}) as command:
        return await command.wait()


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("s3://done/7\\n", "s3://done/7"),
        ("", None),
        ("\\n", None),
        # An ideographic space, a no-break space, a zero-width joiner: real names contain them.
        ("\\343\\200\\200", "\u3000"),
        ("a\\343\\200\\200b", "a\u3000b"),
        ("a\\302\\240", "a\u00a0"),
        ("a\\342\\200\\215b", "a\u200db"),
    ],
)
async def test_result_is_any_line_that_the_database_accepts(written: str, reference: str | None) -> None:
    """The line is kept as written; only ASCII white space around it is removed."""
    assert await run(f"printf '{written}' > \"$WEBHOOKD_RESULT_FILE\"") == CommandSuccess(reference)


@pytest.mark.parametrize(
    "written",
    [
        "seq 9",
        "printf 'a\\tb'",
        "printf 'a\\302\\205b'",
        "printf '\\377'",
        "seq 800",
        "printf %02001d 7",
        "printf '%20000s' ''",
    ],
)
async def test_invalid_result_is_a_permanent_failure(written: str) -> None:
    """The message says what is expected; a retry would fail the same way."""
    failure = await run(f'{written} > "$WEBHOOKD_RESULT_FILE"')
    assert isinstance(failure, CommandFailure)
    assert (failure.error_code, failure.permanent) == ("RESULT_REF_INVALID", True)
    assert failure.error_message == EXPECTED


@pytest.mark.parametrize("made", ["mkfifo", "mkdir", "ln -s /dev/zero"])
async def test_result_must_be_a_regular_file(made: str) -> None:
    """A FIFO or a device would block the worker."""
    failure = await run(f'{made} "$WEBHOOKD_RESULT_FILE"')
    assert isinstance(failure, CommandFailure)
    assert (failure.error_code, failure.permanent) == ("RESULT_REF_INVALID", True)
    assert failure.error_message == "WEBHOOKD_RESULT_FILE: not a regular file"


def test_rejected_result_file_is_closed(tmp_path: Path) -> None:
    """No file descriptor leaks: a worker runs for long."""
    opened = set(Path("/dev/fd").iterdir())
    for _ in range(3):
        with pytest.raises(OSError, match="not a regular file"):
            _read(tmp_path)
    assert set(Path("/dev/fd").iterdir()) == opened


async def test_huge_result_file_is_not_read() -> None:
    """A sparse file of 64 GiB is rejected after the first bytes."""
    failure = await run('printf x > "$WEBHOOKD_RESULT_FILE"; truncate -s 64G "$WEBHOOKD_RESULT_FILE"')
    assert isinstance(failure, CommandFailure)
    assert failure.error_message == EXPECTED
