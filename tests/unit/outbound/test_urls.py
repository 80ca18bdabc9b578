"""The rules for the text of a callback URL: part A of the bad inputs."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.outbound.test_addresses import BLOCKED
from webhookd.outbound.addresses import AddressPolicy
from webhookd.outbound.endpoint import EndpointProblem, check_callback_url

PUBLIC_ONLY = AddressPolicy()
LOCAL = AddressPolicy.of(["127.0.0.0/8", "::1/128"])

# The CHECK of the column, as a Python pattern.
COLUMN_CHECK = re.compile(r"https://[^\s\x00-\x1f\x7f-\x9f/?#@]+([/?][^\s\x00-\x1f\x7f-\x9f#]*)?")

REFUSED = {
    "A1": [("http://example.com/", "https_required"), ("HTTP://example.com/", "https_required")],
    "A2": [
        ("ftp://example.com/", "scheme"),
        ("file:///etc/passwd", "scheme"),
        ("unix:///x", "scheme"),
        ("javascript:alert(1)", "scheme"),
        ("//example.com/p", "scheme"),
        ("example.com", "scheme"),
        ("", "scheme"),
        ("https", "scheme"),
        ("http\u017f://example.com/", "scheme"),
    ],
    "A3": [
        ("https:/example.com", "host_missing"),
        ("https:///path", "host_missing"),
        ("https:example.com", "host_missing"),
        ("https://", "host_missing"),
        ("https://?q", "host_missing"),
        ("https://:443/", "host_missing"),
    ],
    "A4": [
        (" https://example.com", "control_char"),
        ("https://example.com\n", "control_char"),
        ("https://exa\tmple.com", "control_char"),
        ("https://example.com/a\r\nX: y", "control_char"),
        ("https://example.com/\x00", "control_char"),
        ("https://example.com/\x7f", "control_char"),
        ("https://example.com/a b", "control_char"),
        ("https://example.com/\x85", "control_char"),
        ("https://example.com/\u2028", "control_char"),
        ("https://exam\u200bple.com/", "control_char"),
        ("https://example.com/\u202e", "control_char"),
        ("https://example.com/\ud800", "control_char"),
    ],
    "A5": [("https://user:pw@example.com/", "userinfo"), ("https://@example.com/", "userinfo")],
    "A6": [("https://example.com@127.0.0.1/", "userinfo"), ("https://example.com\\@127.0.0.1/", "userinfo")],
    "A8": [("https://127.0.0.1#@example.com/", "fragment"), ("https://example.com/#", "fragment")],
    "A16": [("https://[::ffff:127.0.0.1]/", "blocked_address")],
    "A21": [
        ("https://[fe80::1%25lo]/", "ipv6_zone"),
        ("https://[fe80::1%lo]/", "ipv6_zone"),
        ("https://[2606:4700::1%251]/", "ipv6_zone"),
    ],
    "A24": [
        ("https://2130706433/", "host"),
        ("https://127.1/", "host"),
        ("https://0177.0.0.1/", "host"),
        ("https://017700000001/", "host"),
        ("https://0/", "host"),
        ("https://127.0.0.1./", "host"),
        ("https://1.2.3.4.5/", "host"),
        ("https://256.1.1.1/", "host"),
        ("https://8.8.8.08/", "host"),
    ],
    "A25": [
        ("https://0x7f000001/", "host"),
        ("https://0x7f.0.0.1/", "host"),
        ("https://0X7F.1/", "host"),
        ("https://example.0x/", "host"),
    ],
    "A29": [
        ("https://\uff45xample.com/", "host"),
        ("https://ex\u3002ample.com/", "host"),
        ("https://\u2460.example/", "host"),
        ("https://\uff11\uff12\uff17.0.0.1/", "host"),
        ("https://\ufb00.example/", "host"),
        ("https://\u212aelvin.example/", "host"),
        ("https://İ.example/", "host"),
        ("https://bu\u0308cher.example/", "host"),
        ("https://xn--0.example/", "host"),
        ("https://☃.example/", "host"),
    ],
    "A30": [
        ("https://localhost/", "host"),
        ("https://x.localhost/", "host"),
        ("https://LOCALHOST/", "host"),
        ("https://printer.local/", "host"),
        ("https://metadata.google.internal/", "host"),
        ("https://intranet/", "host"),
        ("https://router.home.arpa/", "host"),
        ("https://a.onion/", "host"),
        ("https://localhost./", "host"),
    ],
    "A31": [
        ("https://a..b/", "host"),
        ("https://.example.com/", "host"),
        ("https://example.com./", "host"),
        ("https://-a.example.com/", "host"),
        ("https://a-.example.com/", "host"),
        ("https://a_b.example.com/", "host"),
        ("https://%65xample.com/", "host"),
        ("https://exam*ple.com/", "host"),
        ("https://example.com\\evil.example/", "host"),
        (f"https://{'a' * 64}.example/", "host"),
        (f"https://{'a.' * 130}example/", "host"),
        ("https://[::1/", "host"),
        ("https://[::1]x/", "host"),
        ("https://[v1.x]/", "host"),
        ("https://[127.0.0.1]/", "host"),
        ("https://[]/", "host"),
    ],
    "A33": [
        ("https://example.com:0/", "port"),
        ("https://example.com:22/", "port"),
        ("https://example.com:25/", "port"),
        ("https://example.com:80/", "port"),
        ("https://example.com:1023/", "port"),
    ],
    "A34": [
        ("https://example.com:99999/", "port"),
        ("https://example.com:65536/", "port"),
        ("https://example.com:-1/", "port"),
        ("https://example.com:443:80/", "port"),
        ("https://example.com:/", "port"),
        ("https://example.com:+443/", "port"),
        ("https://example.com:\uff14\uff14\uff13/", "port"),
        ("https://example.com:1e4/", "port"),
        ("https://[2606:4700::1111]:22/", "port"),
    ],
    "A36": [
        (f"https://example.com/{'a' * 20_000}", "url_too_long"),
        (f"https://example.com/{'a' * 481}", "url_too_long"),
        (f"https://example.com/{'é' * 100}", "url_too_long"),
    ],
    "path": [
        ("https://example.com/%00", "path"),
        ("https://example.com/a%0d%0aX:y", "path"),
        ("https://example.com/?q=%0A", "path"),
        ("https://example.com/%7F", "path"),
        ("https://example.com/%1f", "path"),
        ("https://example.com/%", "path"),
        ("https://example.com/%zz", "path"),
        ("https://example.com/%4", "path"),
        ("https://example.com/a\\b", "path"),
    ],
}


def literal(address: str) -> str:
    """Make the URL of an address."""
    return f"https://[{address}]/" if ":" in address else f"https://{address}/"


@pytest.mark.parametrize(
    ("text", "code"),
    [
        pytest.param(text, code, id=f"{row}-{number}-{code}")
        for row, cases in REFUSED.items()
        for number, (text, code) in enumerate(cases)
    ],
)
def test_a_bad_url_is_refused_with_its_code(text: str, code: str) -> None:
    """Each row has its stable code."""
    problem = check_callback_url(text, PUBLIC_ONLY)
    assert isinstance(problem, EndpointProblem)
    assert problem.code == code
    assert problem.detail


@pytest.mark.parametrize(
    "address",
    [
        pytest.param(address, id=f"{row}-{address}")
        for row, addresses in BLOCKED.items()
        for address in addresses
    ],
)
def test_a_literal_address_that_is_not_public_is_refused(address: str) -> None:
    """The address rule applies to the text already, long before a dial."""
    problem = check_callback_url(literal(address), PUBLIC_ONLY)
    assert isinstance(problem, EndpointProblem)
    assert problem.code == "blocked_address"


@pytest.mark.parametrize(
    ("text", "stored"),
    [
        ("https://example.com", "https://example.com/"),
        ("HTTPS://Example.COM:443/A", "https://example.com/A"),
        ("https://example.com:8443/hooks?a=b&c=%2F", "https://example.com:8443/hooks?a=b&c=%2F"),
        ("https://example.com:1024/", "https://example.com:1024/"),
        ("https://example.com:65535/", "https://example.com:65535/"),
        ("https://example.com:08443/", "https://example.com:8443/"),
        ("https://example.com?a", "https://example.com/?a"),
        ("https://example.com/a@b:c", "https://example.com/a@b:c"),
        ("https://8.8.8.8/", "https://8.8.8.8/"),
        ("https://[2606:4700:0:0:0:0:0:1111]:8443/x", "https://[2606:4700::1111]:8443/x"),
        ("https://1.example.com/", "https://1.example.com/"),
        ("https://r3---sn.example.com/", "https://r3---sn.example.com/"),
        ("https://bücher.example/", "https://xn--bcher-kva.example/"),
        ("https://BÜCHER.example/", "https://xn--bcher-kva.example/"),
        ("https://faß.example/", "https://xn--fa-hia.example/"),
        ("https://xn--bcher-kva.example/", "https://xn--bcher-kva.example/"),
        ("https://example.com/ü?ü", "https://example.com/%C3%BC?%C3%BC"),
        ("https://example.com/{id}|<>\"'", "https://example.com/%7Bid%7D%7C%3C%3E%22'"),
        ("https://example.com/a/../b//c", "https://example.com/a/../b//c"),
        (f"https://example.com/{'a' * 480}", f"https://example.com/{'a' * 480}"),
    ],
)
def test_a_good_url_is_stored_in_one_form(text: str, stored: str) -> None:
    """A29 and others: the stored form is ASCII, passes the column's CHECK, and does not change again."""
    url = check_callback_url(text, PUBLIC_ONLY)
    assert isinstance(url, str)
    assert url == stored
    assert COLUMN_CHECK.fullmatch(stored)
    assert check_callback_url(stored, PUBLIC_ONLY) == url


@pytest.mark.parametrize(
    "text",
    [
        "https://localhost:8443/",
        "https://intranet/",
        "https://x.internal/",
        "https://127.0.0.1:8443/",
        "https://[::1]:8443/",
        "https://[::ffff:7f00:1]/",
    ],
)
def test_allowed_network_permits_private_names_and_its_addresses(text: str) -> None:
    """A30 and A9: allow_networks permits private names, and the addresses in the networks."""
    assert isinstance(check_callback_url(text, LOCAL), str)
    assert isinstance(check_callback_url(text, PUBLIC_ONLY), EndpointProblem)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("https://10.0.0.1/", "blocked_address"),
        ("https://127.1/", "host"),
        ("https://0x7f000001/", "host"),
        ("http://localhost/", "https_required"),
        ("https://localhost:22/", "port"),
    ],
)
def test_allowed_network_permits_nothing_else(text: str, code: str) -> None:
    """Other addresses, numeric hosts, plain HTTP and low ports stay refused."""
    problem = check_callback_url(text, LOCAL)
    assert isinstance(problem, EndpointProblem)
    assert problem.code == code


@given(st.one_of(st.text(), st.text(max_size=60).map("https://".__add__)))
def test_any_text_is_either_refused_or_storable(text: str) -> None:
    """A31: no text raises; an accepted URL passes the column's CHECK and does not change again."""
    result = check_callback_url(text, LOCAL)
    if isinstance(result, str):
        assert COLUMN_CHECK.fullmatch(result)
        assert result.isascii()
        assert len(result) <= 500
        assert check_callback_url(result, LOCAL) == result
