"""The shell commands that send a delivery again: signed correctly, and safe whatever the body contains."""

import itertools
import shutil
import subprocess
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from webhookd.console.sent_requests import BODY_FILE, MAX_BODY_IN_COMMAND_BYTES, curl_script, message_of
from webhookd.outbound.signatures import verify

SECRET = "whsec_YW4gZXhhbXBsZSwgbm90IGEgc2VjcmV0IQ=="
EVENT = {
    "id": 7,
    "event_type": "order.paid",
    "correlation_id": 'it\'s $(id) `id` "a"',
    "created_at": "2026-03-01T12:00:00Z",
}
URL = "https://[::1]:8443/a?b={c}&d='$(id)'"
# Writes its arguments, each ended by a NUL character, which no argument can contain.
CURL = """#!/bin/sh
for argument in "$@"; do printf '%s\\0' "$argument"; done
"""
needs_openssl = pytest.mark.skipif(
    not all(map(shutil.which, ("sh", "openssl", "od", "base64"))), reason="the commands need openssl"
)


def sent(folder: Path, payload: str, body_format: str = "raw") -> tuple[list[str], bytes]:
    """Run the commands with a curl that shows its arguments; return these, and the body."""
    message = message_of(EVENT, payload, {"callback_url": URL, "format": body_format})
    program = folder / "curl"
    program.write_text(CURL)
    program.chmod(0o755)
    (folder / BODY_FILE).write_bytes(message.body)
    script = curl_script(message, 2).replace("whsec_...", SECRET)
    result = subprocess.run(
        ["sh", "-eu", "-c", script],
        cwd=folder,
        env={"PATH": f"{folder}:/usr/bin:/bin"},
        capture_output=True,
        check=True,
    )
    assert result.stderr == b""
    return [argument.decode() for argument in result.stdout.split(b"\0")[:-1]], message.body


def check(arguments: list[str], body: bytes) -> None:
    """Check that the request has the body, and is authentic."""
    assert URL in arguments
    headers = dict(
        argument.split(": ", 1) for option, argument in itertools.pairwise(arguments) if option == "--header"
    )
    assert headers["webhook-id"] == "evt_7"
    assert headers["webhook-attempt"] == "2"
    assert headers["webhook-correlation-id"] == EVENT["correlation_id"]
    option, data = arguments[-2:]
    assert (option, data) == (
        ("--data-binary", f"@{BODY_FILE}")
        if len(body) > MAX_BODY_IN_COMMAND_BYTES
        else ("--data-raw", body.decode())
    )
    assert verify([SECRET], headers, body, time.time()) is None


@needs_openssl
@given(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=40))
@hypothesis_settings(max_examples=25)
def test_commands_sign_and_send_any_text(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    """Quotes, substitutions, control characters and bidi characters arrive as they are."""
    payload = f'"{text}"'
    check(*sent(tmp_path_factory.mktemp("script"), payload))


@needs_openssl
def test_commands_send_the_standard_format_and_large_bodies(tmp_path: Path) -> None:
    """The standard body is made as for a delivery; a large body is read from a file."""
    arguments, body = sent(tmp_path, '{"a":1}', "standard")
    check(arguments, body)
    assert body == b'{"type":"order.paid","timestamp":"2026-03-01T12:00:00.000000Z","data":{"a":1}}'
    check(*sent(tmp_path, '"' + "x" * MAX_BODY_IN_COMMAND_BYTES + '"'))


@needs_openssl
def test_shown_commands_contain_no_deceptive_characters() -> None:
    """So the text that somebody reads and copies is the text that runs."""
    message = message_of(EVENT, '"\u202e\x9b\u2028\ufeff"', {"callback_url": URL, "format": "raw"})
    assert curl_script(message, 1).isascii()
