"""The rules for a subscription's custom headers: part D of the bad inputs."""

import pytest

from webhookd.outbound.endpoint import EndpointProblem, check_headers

REFUSED = {
    "D1": [
        ({"X-A": value}, "header_value") for value in ("a\rb", "a\nb", "a\r\nX: y", "\x00", "\x7f", "\x1b")
    ],
    "D2": [
        ({"X-A": "a\tb"}, "header_value"),
        ({"X-A": " a"}, "header_value"),
        ({"X-A": "a "}, "header_value"),
    ],
    "D3": [({name: "1"}, "header_name") for name in ("", "X A", "X:A", "X\n", "Ü", "X(1)", "X\x00")],
    "D4": [
        ({name: "9"}, "header_forbidden") for name in ("Content-Length", "content_length", "CONTENT-LENGTH")
    ],
    "D6": [({"Host": "evil.internal"}, "header_forbidden")],
    "D7": [({"Expect": "100-continue"}, "header_forbidden")],
    "D8": [
        ({name: "1"}, "header_forbidden")
        for name in ("Connection", "Upgrade", "TE", "Trailer", "Keep-Alive", "Proxy-Authorization", "Via")
    ]
    + [({"Transfer-Encoding": "chunked"}, "header_forbidden")],
    "D10": [
        ({name: "1"}, "header_forbidden")
        for name in (
            "User-Agent",
            "Content-Type",
            "Content-Encoding",
            "Accept-Encoding",
            "Cookie",
            "Set-Cookie",
        )
    ],
    "D11": [
        ({name: "1"}, "header_forbidden")
        for name in (
            "x-amz-date",
            "X-Amzn-Trace-Id",
            "x-aws-ec2-metadata-token",
            "x-google-x",
            "x-goog-x",
            "x-gfe-x",
            "x-azure-ref",
            "x-fd-x",
            "Metadata-Flavor",
            "Metadata",
        )
    ],
    "D12": [
        ({"X-A": "a" * 4097}, "header_value_too_long"),
        ({"X-A": "a" * 100_000}, "header_value_too_long"),
        ({f"X-{number}": "1" for number in range(21)}, "too_many_headers"),
        ({f"X-{number}": "a" * 4096 for number in range(4)}, "headers_too_large"),
    ],
    "D13": [({"X-A": "é☃"}, "header_value"), ({"X-A": ""}, "header_value")],
    "ours": [
        ({name: "1"}, "header_forbidden")
        for name in ("webhook-id", "Webhook-Signature", "X-Forwarded-For", "X-HTTP-Method-Override")
    ],
    "twice": [({"X-A": "1", "x-a": "2"}, "header_duplicate")],
}


@pytest.mark.parametrize(
    ("headers", "code"),
    [
        pytest.param(headers, code, id=f"{row}-{number}")
        for row, cases in REFUSED.items()
        for number, (headers, code) in enumerate(cases)
    ],
)
def test_bad_headers_are_refused_with_their_code(headers: dict[str, str], code: str) -> None:
    """Each row is refused, and the message does not repeat a value, which may be a secret."""
    problem = check_headers(headers)
    assert isinstance(problem, EndpointProblem)
    assert problem.code == code
    assert not any(len(value) > 1 and value in problem.detail for value in headers.values())


@pytest.mark.parametrize(
    "headers",
    [
        pytest.param({}, id="none"),
        pytest.param({"Authorization": "Bearer abc.def=="}, id="credentials"),
        pytest.param({"X-A": "a" * 4096}, id="D12-longest value"),
        pytest.param({f"X-{number}": "1" for number in range(20)}, id="D12-most headers"),
        pytest.param({"X-Tenant_1": "~!{}"}, id="odd but good"),
        pytest.param({"Accept": "application/json"}, id="accept"),
    ],
)
def test_valid_headers_are_returned_unchanged(headers: dict[str, str]) -> None:
    """Valid headers are stored exactly as given."""
    assert check_headers(headers) == headers


def test_d12_the_total_counts_what_is_sent() -> None:
    """Names, values and separators count: exactly 16 KiB pass, and one more byte does not."""
    headers = {f"X-{number}": "a" * 4089 for number in range(4)}  # 4 · (3 + 4089 + 4) = 16384
    assert check_headers(headers) == headers
    assert isinstance(check_headers({**headers, "X-0": "a" * 4090}), EndpointProblem)
