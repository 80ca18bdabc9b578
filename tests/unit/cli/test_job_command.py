"""The command of `jobs work`: what it may leave as its result, and what becomes of a file that is none."""

import asyncio
from pathlib import Path

import pytest

from webhookd.jobqueue.cli.command import Failure, RunningCommand, Success, _read

ASKED = "one line of 1 to 2000 characters, none of them a control character"


async def ended(script: str) -> Success | Failure:
    """How a command that ended with 0 is taken."""
    async with asyncio.timeout(20), RunningCommand(["sh", "-c", script], b"{}", {}) as command:
        return await command.ended()


@pytest.mark.parametrize(
    ("written", "reference"),
    [
        ("s3://done/7\\n", "s3://done/7"),
        ("", None),
        ("\\n", None),
        # An ideographic space, a no-break space, a joined pair: characters of names as people write them.
        ("\\343\\200\\200", "\u3000"),
        ("a\\343\\200\\200b", "a\u3000b"),
        ("a\\302\\240", "a\u00a0"),
        ("a\\342\\200\\215b", "a\u200db"),
    ],
)
async def test_a_result_is_any_line_that_the_database_takes(written: str, reference: str | None) -> None:
    """As it was written, but for white space of ASCII around it."""
    assert await ended(f"printf '{written}' > \"$WEBHOOKD_RESULT_FILE\"") == Success(reference)


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
async def test_what_is_no_reference_is_told_what_one_is(written: str) -> None:
    """For good: it would be the same the next time."""
    failure = await ended(f'{written} > "$WEBHOOKD_RESULT_FILE"')
    assert isinstance(failure, Failure)
    assert (failure.error_code, failure.permanent) == ("RESULT_REF_INVALID", True)
    assert failure.error_message == f"WEBHOOKD_RESULT_FILE must have {ASKED}, in UTF-8"


@pytest.mark.parametrize("made", ["mkfifo", "mkdir", "ln -s /dev/zero"])
async def test_a_result_is_read_of_a_file_alone(made: str) -> None:
    """A FIFO has nobody at its other end, a device none: neither is waited for."""
    failure = await ended(f'{made} "$WEBHOOKD_RESULT_FILE"')
    assert isinstance(failure, Failure)
    assert (failure.error_code, failure.permanent) == ("RESULT_REF_INVALID", True)
    assert failure.error_message == "WEBHOOKD_RESULT_FILE: it is no file"


def test_what_is_no_file_is_not_left_open(tmp_path: Path) -> None:
    """A worker lives long, and may meet many of them."""
    opened = set(Path("/dev/fd").iterdir())
    for _ in range(3):
        with pytest.raises(OSError, match="it is no file"):
            _read(tmp_path)
    assert set(Path("/dev/fd").iterdir()) == opened


async def test_no_more_is_read_than_a_reference_has() -> None:
    """A file of 64 GiB, nearly all of it a hole, is no reference."""
    failure = await ended('printf x > "$WEBHOOKD_RESULT_FILE"; truncate -s 64G "$WEBHOOKD_RESULT_FILE"')
    assert isinstance(failure, Failure)
    assert failure.error_message.endswith("in UTF-8")
