"""Reads and checks the file of `console.logo`, at start and at each reload."""

import stat
from pathlib import Path
from typing import NamedTuple
from xml.parsers import expat

from webhookd.core.errors import ConfigurationError
from webhookd.core.limits import MAX_LOGO_BYTES

SVG_ROOT = "http://www.w3.org/2000/svg svg"
# An SVG file may contain scripts. A browser does not run them in an <img>, but it does in a page of its own.
CONTENT_SECURITY_POLICY = "default-src 'none'; style-src 'unsafe-inline'; sandbox"


class Logo(NamedTuple):
    """An image and its media type."""

    content: bytes
    media_type: str


def read_logo(path: str) -> Logo | None:
    """Read the file; None for an empty path. The content decides what it is, not the name."""
    if not path:
        return None
    content = _read(path)
    media_type = _media_type(content)
    if media_type is None:
        raise ConfigurationError(f"console.logo {path} is not a PNG, SVG, WebP or JPEG image")
    return Logo(content, media_type)


def _read(path: str) -> bytes:
    try:
        # A FIFO or a device would block or never end.
        if not stat.S_ISREG(Path(path).stat().st_mode):
            raise ConfigurationError(f"console.logo {path} is not a file")
        with Path(path).open("rb") as file:
            content = file.read(MAX_LOGO_BYTES + 1)
    except ValueError as error:
        raise ConfigurationError(f"console.logo {path!r} is not a file name") from error
    except OSError as error:
        raise ConfigurationError(f"console.logo {path} cannot be read: {error.strerror}") from error
    if len(content) > MAX_LOGO_BYTES:
        raise ConfigurationError(f"console.logo {path} is larger than {MAX_LOGO_BYTES // 1024} KiB")
    return content


def _media_type(content: bytes) -> str | None:
    if content.startswith(b"\x89PNG\r\n\x1a\n"):
        return "image/png"
    if content.startswith(b"\xff\xd8\xff"):
        return "image/jpeg"
    if content.startswith(b"RIFF") and content[8:12] == b"WEBP":
        return "image/webp"
    return "image/svg+xml" if _is_svg(content) else None


def _is_svg(content: bytes) -> bool:
    """Return whether this is well-formed XML with the root <svg>, without entities of its own."""
    elements: list[str] = []
    entities: list[str] = []
    parser = expat.ParserCreate(namespace_separator=" ")
    parser.StartElementHandler = lambda name, _: elements.append(name)
    parser.EntityDeclHandler = lambda name, *_: entities.append(name)
    try:
        parser.Parse(content, True)
    except expat.ExpatError:
        return False
    return elements[:1] == [SVG_ROOT] and not entities
