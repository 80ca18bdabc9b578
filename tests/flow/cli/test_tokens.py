"""`webhookd token`, and tokens that commands read from a file or the environment."""

import hashlib

from tests.flow.conftest import MakeDaemon
from tests.support.api import tokens
from tests.support.shell import Shell


async def test_created_token_is_accepted(make_daemon: MakeDaemon, lonely: Shell) -> None:
    """The printed entry configures the daemon, and the printed token authorises the commands."""
    made = await lonely.done("token", "shop", "--scope", "ingest", "--scope", "jobs")
    token = made.out.strip()
    assert token.startswith("whd_")
    assert len(token) == 4 + 43
    entry = made.err.splitlines()[1].strip().removesuffix(",")
    [reader] = (await lonely.done("token", "reader", "--scope", "read", "--json")).documents
    assert reader["entry"]["sha256"] == hashlib.sha256(reader["token"].encode()).hexdigest()
    daemon = make_daemon(api={"tokens": tokens({"boot": ["read"]})})
    text = daemon.config_path.read_text()
    line = next(line for line in text.splitlines() if line.startswith("tokens = "))
    daemon.config_path.write_text(text.replace(line, f"{line[:-1]}, {entry}]"))
    await daemon.start()

    cli = lonely.having(WEBHOOKD_URL=f"http://127.0.0.1:{daemon.port}")
    assert (await cli.having(WEBHOOKD_TOKEN=token).done("publish", "a", "1")).out == "1\n"
    assert (await cli.done("publish", "a", "1", "--token-file", "-", given=token.encode())).out == "2\n"
    (cli.folder / "token").write_text(f"{token}\n")
    assert (await cli.done("publish", "a", "1", "--token-file", "token")).out == "3\n"

    forbidden = await cli.run("status", "--token-file", "token")
    assert (forbidden.exit_code, "scope read (forbidden)" in forbidden.error) == (1, True)
    without = await cli.run("status")
    assert (without.exit_code, "requires a token: set WEBHOOKD_TOKEN" in without.error) == (1, True)
    wrong = await cli.having(WEBHOOKD_TOKEN=f"{token}x").run("status")
    assert (wrong.exit_code, "does not accept this token" in wrong.error) == (1, True)
    assert token not in wrong.err


async def test_token_as_an_argument_is_rejected(lonely: Shell) -> None:
    """Exit 2, with the reason and the alternative, without the token. Invalid tokens are exit 2 too."""
    ran = await lonely.run("status", "--token", "whd_secret")
    assert (ran.exit_code, "can see arguments" in ran.error) == (2, True)
    assert "whd_secret" not in ran.err
    for given in (b"", b"a\x00b", "é".encode()):
        ran = await lonely.run("status", "--token-file", "-", given=given)
        assert (ran.exit_code, "--token-file" in ran.error) == (2, True)
    assert (await lonely.run("status", "--token-file", "missing")).exit_code == 2
    assert (await lonely.having(WEBHOOKD_TOKEN="a\nb").run("status")).exit_code == 2
    for words in (("x",), ("x", "--scope", "all"), ("", "--scope", "read"), ("a\nb", "--scope", "read")):
        ran = await lonely.run("token", *words)
        assert (ran.exit_code, ran.out) == (2, "")
        assert ran.error
