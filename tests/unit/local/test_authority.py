"""Tests of the local authority, with OpenSSL as the judge: who is believed, and what becomes of its files."""

import contextlib
import os
import ssl
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509

from webhookd import local_ca as module
from webhookd.core.errors import ConfigurationError
from webhookd.local_ca import Authority
from webhookd.outbound.client import trusted_tls

NOBODY = 65534


def handshake(authority: Authority, serving: ssl.SSLContext, host: str) -> None:
    """A TLS handshake in memory, by a client that trusts this authority as the daemon does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = trusted_tls(authority.ca_file)
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT  # which Python 3.13 and newer do by themselves
    client = trusting.wrap_bio(to_client, to_server, server_hostname=host)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue


def serving(authority: Authority, folder: Path, *hosts: x509.GeneralName) -> ssl.SSLContext:
    """A server with a certificate that whoever has the key made for these hosts."""
    path = folder / "certificate.pem"
    path.write_bytes(authority.issue(hosts))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(path)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_a_receiver_on_this_machine_is_believed(tmp_path: Path, host: str) -> None:
    """By each of its names, under the daemon's own verification."""
    authority = Authority.in_folder(tmp_path)
    handshake(authority, authority.server_tls(), host)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("example.com", x509.DNSName("example.com")),
        ("localhost.example.com", x509.DNSName("localhost.example.com")),
        ("192.0.2.1", x509.IPAddress(ip_address("192.0.2.1"))),
        ("::2", x509.IPAddress(ip_address("::2"))),
    ],
)
def test_nobody_else_is_believed(tmp_path: Path, host: str, name: x509.GeneralName) -> None:
    """A certificate that the stolen key made for another host is refused: the authority is constrained."""
    authority = Authority.in_folder(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="permitted subtree violation"):
        handshake(authority, serving(authority, tmp_path, name), host)


def test_one_that_is_good_for_all_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Found where ours should be: a daemon that trusted it would believe its maker for every host."""
    with monkeypatch.context() as patch:
        everybody = x509.NameConstraints([x509.DNSName("")], None)
        patch.setattr(module, "_CONSTRAINTS", everybody)
        planted = Authority.in_folder(tmp_path).ca_file.read_bytes()
    assert Authority.in_folder(tmp_path).ca_file.read_bytes() != planted


def test_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """They could put an authority of theirs there."""
    (tmp_path / "authority").mkdir()
    (tmp_path / "authority").chmod(0o777)
    with pytest.raises(ConfigurationError):
        Authority.in_folder(tmp_path)


def test_it_is_made_once(tmp_path: Path) -> None:
    """Later starts find it; a certificate made after a restart is believed by who trusted it before."""
    first = Authority.in_folder(tmp_path)
    second = Authority.in_folder(tmp_path)
    assert first.ca_file.read_bytes() == second.ca_file.read_bytes()
    handshake(first, second.server_tls(), "localhost")


def test_two_at_once_make_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes second waits, and gets what the first made."""
    make = module._made
    both_are_making = threading.Barrier(2)

    def make_together(folder: Path) -> module._KeyPair:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_are_making.wait(timeout=0.5)
        return make(folder)

    monkeypatch.setattr(module, "_made", make_together)
    with ThreadPoolExecutor(2) as threads:
        made = list(threads.map(Authority.in_folder, [tmp_path, tmp_path]))
    assert both_are_making.broken
    assert made[0].certificate == made[1].certificate


def test_its_files_are_its_users_alone(tmp_path: Path) -> None:
    """The folder and everything in it; and no certificate's key is left behind."""
    Authority.in_folder(tmp_path).server_tls()
    folder = tmp_path / "authority"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {
        "authority.pem": 0o600,
        "ca.pem": 0o600,
        "lock": 0o600,
    }


@pytest.mark.parametrize("content", [b"", b"\x00", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
def test_a_damaged_file_is_replaced(tmp_path: Path, content: bytes, caplog: pytest.LogCaptureFixture) -> None:
    """And that is said, for a running daemon still trusts the old one."""
    Authority.in_folder(tmp_path)
    (tmp_path / "authority" / "authority.pem").write_bytes(content)
    authority = Authority.in_folder(tmp_path)
    handshake(authority, authority.server_tls(), "localhost")
    assert "made anew" in caplog.text


def test_a_key_of_another_certificate_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two halves of different authorities make none."""
    other = Authority.in_folder(tmp_path / "other")
    Authority.in_folder(tmp_path)
    kept = tmp_path / "authority" / "authority.pem"
    key, mark, _ = kept.read_bytes().partition(b"-----BEGIN CERTIFICATE-----")
    assert mark
    kept.write_bytes(key + other.ca_file.read_bytes())
    authority = Authority.in_folder(tmp_path)
    handshake(authority, authority.server_tls(), "localhost")
    assert "made anew" in caplog.text


def test_one_near_its_end_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """So that no certificate outlives it."""
    with monkeypatch.context() as patch:
        patch.setattr(module, "_AUTHORITY_VALID", timedelta(days=1))
        before = Authority.in_folder(tmp_path).ca_file.read_bytes()
    assert Authority.in_folder(tmp_path).ca_file.read_bytes() != before
    assert "came to its end" in caplog.text


def test_a_crash_between_the_two_files_is_mended(tmp_path: Path) -> None:
    """What to trust is written again from what was kept."""
    authority = Authority.in_folder(tmp_path)
    before = authority.ca_file.read_bytes()
    authority.ca_file.unlink()
    assert Authority.in_folder(tmp_path).ca_file.read_bytes() == before


@pytest.fixture
def as_an_ordinary_user(tmp_path: Path) -> Iterator[None]:
    """Give up root's rights for the time of the test; an ordinary user has none to give up."""
    Authority.in_folder(tmp_path)
    if os.geteuid() != 0:
        (tmp_path / "authority").chmod(0o500)
        (tmp_path / "authority" / "lock").chmod(0o000)
        yield
        (tmp_path / "authority").chmod(0o700)
        return
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    os.seteuid(NOBODY)
    yield
    os.seteuid(0)


@pytest.mark.usefixtures("as_an_ordinary_user")
def test_another_users_authority_is_explained(tmp_path: Path) -> None:
    """In one line, with what to do."""
    with pytest.raises(ConfigurationError, match=r"belongs to another user: use the same user for both .+"):
        Authority.in_folder(tmp_path)


def test_a_folder_that_cannot_be_is_explained(tmp_path: Path) -> None:
    """A file stands where the folder should."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be kept in .*: (Not a directory|File exists)"):
        Authority.in_folder(tmp_path / "file")
