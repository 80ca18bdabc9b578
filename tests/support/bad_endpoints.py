"""All kinds of bad endpoints at once: each has its own URL and an expected outcome of its attempt."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.certificates import Certificates
from tests.support.endpoint import CHUNK, Endpoint, Handshake

EXCERPT_BYTES = 4096
METADATA_URL = "https://169.254.169.254/latest/meta-data/"
ODD_BODY = b"\x00\xff\xfe no text \x00"

Behave = Callable[[Endpoint, str], None]


@dataclass(frozen=True)
class Expected:
    """The expected attempt. The stored excerpt starts with `excerpt`; `held` lasts until the deadline."""

    error_code: str | None
    response_status: int | None = None
    excerpt: bytes = b""
    held: bool = False

    @property
    def fails_soon(self) -> bool:
        return self.error_code is not None and not self.held


# A 2xx status counts, whatever follows it: these have no error code.
ANSWERS: dict[str, tuple[Behave, Expected]] = {
    "hang": (lambda at, path: at.hang(path), Expected("TIMEOUT", held=True)),
    "drip_headers": (lambda at, path: at.drip_headers(path), Expected("TIMEOUT", held=True)),
    "drip_body": (lambda at, path: at.drip_body(200, path), Expected(None, 200, b"..", held=True)),
    "drip_body_500": (lambda at, path: at.drip_body(500, path), Expected("HTTP_500", 500, b"..", held=True)),
    "reset_before_status": (lambda at, path: at.reset_before_status(path), Expected("CONNECT_FAILED")),
    "reset_after_status": (lambda at, path: at.reset_after_status(200, path), Expected(None, 200)),
    "reset_after_500": (lambda at, path: at.reset_after_status(500, path), Expected("HTTP_500", 500)),
    "close_at_once": (lambda at, path: at.close_at_once(path), Expected("CONNECT_FAILED")),
    "redirect": (
        lambda at, path: at.redirect_to(at.url("/never"), 307, path),
        Expected("HTTP_307", 307),
    ),
    "redirect_to_metadata": (
        lambda at, path: at.redirect_to(METADATA_URL, 302, path),
        Expected("HTTP_302", 302),
    ),
    "gzip_bomb": (lambda at, path: at.gzip_bomb(path), Expected(None, 200, b"\x1f\x8b")),
    "endless_body": (
        lambda at, path: at.endless_body(200, path),
        Expected(None, 200, CHUNK[:EXCERPT_BYTES]),
    ),
    "endless_body_500": (
        lambda at, path: at.endless_body(500, path),
        Expected("HTTP_500", 500, CHUNK[:EXCERPT_BYTES]),
    ),
    "garbage": (lambda at, path: at.garbage(path=path), Expected("PROTOCOL_ERROR")),
    "http_0_9": (lambda at, path: at.garbage(b"hello\r\n", path), Expected("PROTOCOL_ERROR")),
    "garbage_length": (
        lambda at, path: at.garbage(b"HTTP/1.1 200 OK\r\nContent-Length: many\r\n\r\n", path),
        Expected("PROTOCOL_ERROR"),
    ),
    "negative_length": (
        lambda at, path: at.garbage(b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", path),
        Expected("PROTOCOL_ERROR"),
    ),
    "two_lengths": (lambda at, path: at.duplicate_content_length(path), Expected("PROTOCOL_ERROR")),
    "long_header": (lambda at, path: at.long_header(path=path), Expected("PROTOCOL_ERROR")),
    "many_headers": (lambda at, path: at.many_headers(path=path), Expected("PROTOCOL_ERROR")),
    "status_999": (lambda at, path: at.answer(999, path=path), Expected("PROTOCOL_ERROR")),
    "switching_protocols": (
        lambda at, path: at.answer(101, headers={"Upgrade": "x", "Connection": "Upgrade"}, path=path),
        Expected("HTTP_101", 101),
    ),
    "non_utf8_reason": (lambda at, path: at.non_utf8_reason(500, path), Expected("HTTP_500", 500)),
    "odd_body": (lambda at, path: at.answer(500, ODD_BODY, path=path), Expected("HTTP_500", 500, ODD_BODY)),
    "long_body": (
        lambda at, path: at.answer(502, b"\x00" * 10_000, path=path),
        Expected("HTTP_502", 502, b"\x00" * EXCERPT_BYTES),
    ),
    "unread": (lambda at, path: at.answer_unread(path), Expected("HTTP_413", 413)),
    "gone": (lambda at, path: at.answer(410, path=path), Expected("HTTP_410", 410)),
    "throttling": (
        lambda at, path: at.retry_after("3600", 429, path),
        Expected("HTTP_429", 429),
    ),
}

# The attempt fails before the request.
HANDSHAKES: dict[str, tuple[Callable[[Certificates], Path], Handshake, Expected]] = {
    "expired": (lambda made: made.expired, Handshake.MODERN, Expected("TLS_FAILED")),
    "self_signed": (lambda made: made.self_signed, Handshake.MODERN, Expected("TLS_FAILED")),
    "wrong_host": (lambda made: made.wrong_host, Handshake.MODERN, Expected("TLS_FAILED")),
    "old_tls": (lambda made: made.good, Handshake.OLD, Expected("TLS_FAILED")),
    "stalled_handshake": (lambda made: made.good, Handshake.STALLED, Expected("TIMEOUT", held=True)),
}


class BadEndpoints:
    """All bad endpoints, listening."""

    def __init__(self, answering: Endpoint, handshaking: dict[str, Endpoint], closed: Endpoint) -> None:
        self.answering = answering
        self.handshaking = handshaking
        self.urls = {name: answering.url(f"/{name}") for name in ANSWERS}
        self.urls |= {name: endpoint.url() for name, endpoint in handshaking.items()}
        self.urls["closed_port"] = closed.url()
        self.expected = {name: expected for name, (_, expected) in ANSWERS.items()}
        self.expected |= {name: expected for name, (_, _, expected) in HANDSHAKES.items()}
        self.expected["closed_port"] = Expected("CONNECT_FAILED")

    @classmethod
    @contextlib.contextmanager
    def listening(cls, certificates: Certificates) -> Iterator["BadEndpoints"]:
        """Listen for the block."""
        with contextlib.ExitStack() as stack:
            answering = stack.enter_context(Endpoint(certificates.good))
            for name, (behave, _) in ANSWERS.items():
                behave(answering, f"/{name}")
            closed = stack.enter_context(Endpoint(certificates.good))
            closed.stop_listening()
            handshaking = {
                name: stack.enter_context(Endpoint(certificate(certificates), handshake))
                for name, (certificate, handshake, _) in HANDSHAKES.items()
            }
            yield cls(answering, handshaking, closed)
