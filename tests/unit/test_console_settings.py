"""The settings of the console: addresses that are safe in links and headers, and a logo that is an image."""

import base64
import os
from pathlib import Path

import pytest

from webhookd.console.logo import read_logo
from webhookd.core.configuration import load_settings
from webhookd.core.errors import ConfigurationError
from webhookd.core.limits import MAX_LOGO_BYTES
from webhookd.core.settings import ApiSettings, Settings, is_origin
from webhookd.daemon.setup import console_address, console_warnings

PNG = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="
)
JPEG = b"\xff\xd8\xff\xe0\x00\x10JFIF\x00"
WEBP = b"RIFF\x1a\x00\x00\x00WEBPVP8L"
SVG = b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 1 1"><rect width="1" height="1"/></svg>'
COMMENTED = b'<?xml version="1.0" encoding="UTF-8"?>\n<!-- made by an editor -->\n' + SVG
DOCTYPE = (
    b'<!DOCTYPE svg PUBLIC "-//W3C//DTD SVG 1.1//EN" "http://www.w3.org/Graphics/SVG/1.1/DTD/svg11.dtd">'
    + SVG
)
PREFIXED = b'<s:svg xmlns:s="http://www.w3.org/2000/svg"/>'

ORIGINS = [
    "https://hooks.example.com",
    "https://hooks.example.com:8443",
    "http://127.0.0.1:8470",
    "http://localhost",
    "http://[::1]:8470",
    "https://xn--bcher-kva.example",
    "http://web_1:8470",
    "https://a-b.c-d.example",
]
BAD_ORIGINS = [
    "hooks.example.com",
    "//hooks.example.com",
    "ftp://hooks.example.com",
    "javascript://hooks.example.com",
    "HTTPS://hooks.example.com",
    "https://Hooks.example.com",
    "https://",
    "https://:8470",
    "https://hooks.example.com/",
    "https://hooks.example.com/path",
    "https://hooks.example.com?x=1",
    "https://hooks.example.com#x",
    "https://user@hooks.example.com",
    "https://user:password@hooks.example.com",
    "https://hooks.example.com:",
    "https://hooks.example.com:0",
    "https://hooks.example.com:65536",
    "https://hooks.example.com:x",
    "https://hooks..example.com",
    "https://hooks.example.com.",
    "https://[::1",
    "https://[1.2.3.4]",
    "https://[::1%25eth0]",
    "https://*.example.com",
    "https://bücher.example",
    "https://hooks.example.com ",
    " https://hooks.example.com",
    "https://hooks.example.com\n",
    "https://hooks.example.com\r\nx: y",
    "https://hooks.example.com; script-src *",
    "https://hooks.example.com, https://evil.example",
    "https://hooks.example.com https://evil.example",
    "https://hooks.example.com'",
    "'self'",
    "'none'",
    "*",
    "data:",
    "https:",
    "null",
    "https://a\0b",
    "https://a\u202eb",
    f"https://{'a' * 300}.example",
]


def refusal(environment: dict[str, str]) -> str:
    """Return the error message for a setting in the environment: one line."""
    with pytest.raises(ConfigurationError) as caught:
        load_settings(None, environment)
    message = str(caught.value)
    assert len(message.splitlines()) == 1
    return message


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an empty folder."""
    monkeypatch.chdir(tmp_path)


# Addresses


@pytest.mark.parametrize("origin", ORIGINS)
def test_origin_is_accepted(origin: str) -> None:
    """As api.public_url, and among the origins that may frame the portal."""
    assert is_origin(origin)
    settings = load_settings(
        None,
        {
            "WEBHOOKD_API_PUBLIC_URL": origin,
            "WEBHOOKD_CONSOLE_FRAME_ANCESTORS": f"https://app.example.com, {origin}",
        },
    )
    assert settings.api.public_url == origin
    assert settings.console.frame_ancestors == ("https://app.example.com", origin)


@pytest.mark.parametrize("origin", BAD_ORIGINS)
def test_anything_else_is_rejected(tmp_path: Path, origin: str) -> None:
    """In both places; the message has an example. Nothing may add a directive to a header."""
    assert not is_origin(origin)
    text = origin.encode("unicode_escape").decode().replace("\\x", "\\u00")
    for section, key, value in (
        ("api", "public_url", f'"{text}"'),
        ("console", "frame_ancestors", f'["https://app.example.com", "{text}"]'),
    ):
        path = tmp_path / f"{section}.toml"
        path.write_text(f"[{section}]\n{key} = {value}\n")
        with pytest.raises(ConfigurationError, match=rf"{section}\.{key}.*like https://") as caught:
            load_settings(path, {})
        assert len(str(caught.value).splitlines()) == 1


def test_defaults_are_empty() -> None:
    """No public address, and no page may frame the portal."""
    assert Settings().api.public_url == ""
    assert Settings().console.frame_ancestors == ()
    assert load_settings(None, {"WEBHOOKD_API_PUBLIC_URL": "", "WEBHOOKD_CONSOLE_FRAME_ANCESTORS": ""}) == (
        Settings()
    )


def test_frame_ancestors_are_bounded() -> None:
    """The header that contains them has a size."""
    many = [f"https://app{number}.example.com" for number in range(21)]
    settings = load_settings(None, {"WEBHOOKD_CONSOLE_FRAME_ANCESTORS": ",".join(many[:20])})
    assert len(settings.console.frame_ancestors) == 20
    assert "20" in refusal({"WEBHOOKD_CONSOLE_FRAME_ANCESTORS": ",".join(many)})


@pytest.mark.parametrize(
    ("public_url", "warned"),
    [
        ("", False),
        ("https://hooks.example.com", False),
        ("http://127.0.0.1:8470", False),
        ("http://[::1]", False),
        ("http://localhost", False),
        ("http://hooks.example.com", True),
        ("http://10.0.0.1:8470", True),
    ],
)
def test_public_address_without_tls_is_a_warning(public_url: str, *, warned: bool) -> None:
    """Not on this machine itself."""
    found = console_warnings(Settings(api=ApiSettings(public_url=public_url)))
    assert ["api.public_url is not https" in text for text in found] == [True] * warned


@pytest.mark.parametrize(
    ("public_url", "host", "port", "address"),
    [
        ("", "127.0.0.1", 8470, "http://127.0.0.1:8470/"),
        ("", "::1", 8470, "http://[::1]:8470/"),
        ("", "0.0.0.0", 80, "http://127.0.0.1:80/"),  # noqa: S104  nothing is bound here
        ("", "::", 80, "http://[::1]:80/"),
        ("", "10.1.2.3", 8470, "http://10.1.2.3:8470/"),
        ("https://hooks.example.com", "0.0.0.0", 8470, "https://hooks.example.com/"),  # noqa: S104
    ],
)
def test_address_of_the_console(public_url: str, host: str, port: int, address: str) -> None:
    """A browser can open it."""
    assert console_address(public_url, host, port) == address


# Name and time


@pytest.mark.parametrize("name", ["a", "Acme Webhooks", "Bücher & Söhne <x>", "網路鉤子", "x" * 60])
def test_printable_name_is_accepted(name: str) -> None:
    """Pages escape it."""
    assert load_settings(None, {"WEBHOOKD_CONSOLE_NAME": name}).console.name == name


@pytest.mark.parametrize(
    "name", ["", " ", "x" * 61, "a\nb", "a\tb", "\x1b[31m", "a\u202eb", "a\u200bb", "\udc80"]
)
def test_other_name_is_rejected(name: str) -> None:
    """Control characters, and characters that reverse or hide text."""
    assert refusal({"WEBHOOKD_CONSOLE_NAME": name}).startswith("console.name must be 1 to 60 printable")


@pytest.mark.parametrize("value", ["299", "2592001", "0", "-1", "inf", "nan", "x"])
def test_session_seconds_out_of_range(value: str) -> None:
    """The message names the key."""
    assert "WEBHOOKD_CONSOLE_SESSION_SECONDS" in refusal({"WEBHOOKD_CONSOLE_SESSION_SECONDS": value})


# The logo


@pytest.mark.parametrize(
    ("content", "media_type"),
    [
        (PNG, "image/png"),
        (JPEG, "image/jpeg"),
        (WEBP, "image/webp"),
        (SVG, "image/svg+xml"),
        (COMMENTED, "image/svg+xml"),
        (DOCTYPE, "image/svg+xml"),
        (PREFIXED, "image/svg+xml"),
        (PNG + b"x" * (MAX_LOGO_BYTES - len(PNG)), "image/png"),
    ],
)
def test_logo_is_recognised_by_its_content(tmp_path: Path, content: bytes, media_type: str) -> None:
    """Whatever its name is."""
    path = tmp_path / "logo.txt"
    path.write_bytes(content)
    logo = read_logo(str(path))
    assert logo is not None
    assert (logo.content, logo.media_type) == (content, media_type)


BILLION_LAUGHS = (
    b'<!DOCTYPE svg [<!ENTITY a "aaaaaaaaaa"><!ENTITY b "&a;&a;&a;&a;&a;&a;&a;&a;&a;&a;">]>'
    b'<svg xmlns="http://www.w3.org/2000/svg"><text>&b;</text></svg>'
)
EXTERNAL = (
    b'<!DOCTYPE svg [<!ENTITY a SYSTEM "file:///etc/passwd">]>'
    b'<svg xmlns="http://www.w3.org/2000/svg"><text>&a;</text></svg>'
)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"GIF89a",
        b"<html><svg xmlns='http://www.w3.org/2000/svg'/></html>",
        b"<svg/>",
        b"<svg xmlns='http://www.w3.org/1999/xhtml'/>",
        SVG[:-1],
        SVG + b"<script/>",
        b"RIFF\x1a\x00\x00\x00WAVE",
        b"\xff" + SVG,
        BILLION_LAUGHS,
        EXTERNAL,
        b"<a>" * 50_000,
        b"%PDF-1.7",
    ],
)
def test_other_content_is_rejected(tmp_path: Path, content: bytes) -> None:
    """The message names the file and the formats."""
    path = tmp_path / "logo.png"
    path.write_bytes(content)
    with pytest.raises(
        ConfigurationError, match=r"^console\.logo .*logo\.png is not a PNG, SVG, WebP or JPEG"
    ):
        read_logo(str(path))


def test_large_logo_is_rejected(tmp_path: Path) -> None:
    """One byte more than the limit."""
    path = tmp_path / "logo.png"
    path.write_bytes(PNG + b"x" * (MAX_LOGO_BYTES + 1 - len(PNG)))
    with pytest.raises(ConfigurationError, match="is larger than 256 KiB"):
        read_logo(str(path))


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("missing.png", "No such file"),
        (".", "is not a file"),
        ("/dev/zero", "is not a file"),
        ("fifo", "is not a file"),
        ("a\0b", "is not a file name"),
        ("x" * 5000, "File name too long"),
    ],
)
def test_path_that_is_no_file_is_rejected(tmp_path: Path, path: str, words: str) -> None:
    """At once: a FIFO would block the start."""
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(ConfigurationError, match=words) as caught:
        read_logo(path)
    assert str(caught.value).startswith("console.logo ")
    assert len(str(caught.value).splitlines()) == 1


def test_no_logo() -> None:
    """It is the default."""
    assert read_logo(Settings().console.logo) is None
