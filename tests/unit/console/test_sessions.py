"""Sessions: what a cookie allows, when it ends, and that nobody else can make one."""

import hashlib
from typing import Any

import msgspec
import pytest

from webhookd.console.links import fingerprint
from webhookd.console.sessions import Area, Cookie, Signer, new_id, of_token, session_of
from webhookd.core.settings import ApiSettings, Scope, Settings, Token

NOW = 1_000_000.0
KEY = b"k" * 32


def token(
    name: str = "ops", scopes: tuple[Scope, ...] = ("read", "operate"), tenant: str | None = None
) -> Token:
    """Return a token whose text is its name."""
    return Token(name=name, sha256=hashlib.sha256(name.encode()).hexdigest(), scopes=scopes, tenant=tenant)


def settings(*tokens: Token) -> Settings:
    """Return settings with these tokens."""
    return Settings(api=ApiSettings(tokens=tokens))


def cookie(of: Token | None, **changed: Any) -> Cookie:
    """Return a cookie of the console that has not ended."""
    given = Cookie(area="", id="id", token=fingerprint(of), ends_at=int(NOW) + 60)
    return msgspec.structs.replace(given, **changed)


def portal_cookie(of: Token | None, *capabilities: str, **changed: Any) -> Cookie:
    """Return a cookie that a portal link made."""
    more = {"area": "/portal", "actor": "ops", "tenant": "acme", "capabilities": frozenset(capabilities)}
    return cookie(of, **(more | changed))


def test_a_session_has_the_rights_that_its_token_has_now() -> None:
    """The rights are in the configuration, not in the cookie: a reload changes them."""
    found = session_of(cookie(token()), Area.CONSOLE, settings(token()), NOW)
    assert found is not None
    assert found.scopes == frozenset({"read", "operate"})
    assert (found.actor, found.may_see_secrets) == ("ops", False)
    changed = token(scopes=("read", "subscriptions"))
    found = session_of(cookie(token()), Area.CONSOLE, settings(changed), NOW)
    assert found is not None
    assert found.scopes == frozenset({"read", "subscriptions"})
    assert found.may_see_secrets


@pytest.mark.parametrize("made", [cookie, lambda of: portal_cookie(of, "view")])
def test_a_session_ends_with_its_token(made: Any) -> None:
    """Also a session of a portal link that the token made, and if other tokens or none are left."""
    area = Area(made(token()).area)
    assert session_of(made(token()), area, settings(token()), NOW) is not None
    assert session_of(made(token()), area, settings(token("other")), NOW) is None
    assert session_of(made(token()), area, settings(), NOW) is None


def test_requests_with_a_token_in_the_header_are_one_session_for_each_token() -> None:
    """Without a cookie there is nothing to log out of; another token is another session."""
    mine, again, other = (of_token(token(name)) for name in ("ops", "ops", "other"))
    assert mine == again
    assert mine.id != other.id
    assert not mine.is_logged_in


def test_a_session_ends_at_its_time() -> None:
    """Not at the last second, but after it."""
    found = cookie(token())
    assert session_of(found, Area.CONSOLE, settings(token()), found.ends_at - 1) is not None
    assert session_of(found, Area.CONSOLE, settings(token()), found.ends_at) is None


def test_a_cookie_is_valid_in_its_area_only() -> None:
    """A portal cookie that is sent as the console's is refused, and the reverse."""
    assert session_of(cookie(token()), Area.PORTAL, settings(token()), NOW) is None
    assert session_of(portal_cookie(token(), "view"), Area.CONSOLE, settings(token()), NOW) is None


def test_a_cookie_from_before_tokens_ends_with_the_first_token() -> None:
    """A portal link that was made without tokens does not survive the first token."""
    made = portal_cookie(None, "view", "manage")
    assert session_of(made, Area.PORTAL, settings(), NOW) is not None
    assert session_of(made, Area.PORTAL, settings(token()), NOW) is None


@pytest.mark.parametrize(
    ("capabilities", "scopes", "secrets"),
    [
        (("view",), {"read"}, False),
        (("view", "manage"), {"read", "subscriptions"}, False),
        (("view", "resend"), {"read", "operate"}, False),
        (("view", "secrets"), {"read"}, True),
    ],
)
def test_capabilities_of_a_portal(capabilities: tuple[str, ...], scopes: set[Scope], secrets: bool) -> None:
    """Each capability gives what it says, for one tenant; the token's own rights give nothing more."""
    maker = token(scopes=("read", "operate", "subscriptions", "ingest", "jobs"))
    found = session_of(portal_cookie(maker, *capabilities), Area.PORTAL, settings(maker), NOW)
    assert found is not None
    assert found.scopes == frozenset(scopes)
    assert (found.may_see_secrets, found.tenant) == (secrets, "acme")
    assert found.came_by_link


def test_only_the_holder_of_the_key_can_sign() -> None:
    """Another key, another purpose, or a changed byte is refused; so is any text."""
    signer = Signer(KEY)
    sealed = signer.seal("session", cookie(token()))
    assert msgspec.json.decode(signer.unseal("session", sealed) or b"", type=Cookie) == cookie(token())
    assert Signer(b"x" * 32).unseal("session", sealed) is None
    assert signer.unseal("message", sealed) is None
    content, _, signature = sealed.partition(".")
    for wrong in (
        "",
        ".",
        content,
        f"{content}.",
        f".{signature}",
        f"A{sealed}",
        f"{sealed}A",
        "é.é",
        "\udcff.a",
        f"{content}.\udcff",
    ):
        assert signer.unseal("session", wrong) is None, wrong


def test_form_tokens_differ_by_session() -> None:
    """A form of one session is refused in another, also of the same token."""
    signer = Signer(KEY)
    [first, second] = [
        session_of(cookie(token(), id=new_id()), Area.CONSOLE, settings(token()), NOW) for _ in range(2)
    ]
    assert first is not None
    assert second is not None
    assert signer.form_token(first) != signer.form_token(second)
