"""Tests of the local certificate, with OpenSSL as the judge: what it is trusted for, and its files."""

import contextlib
import os
import ssl
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from webhookd import local_certificate
from webhookd.core.errors import ConfigurationError
from webhookd.local_certificate import LocalCertificate
from webhookd.outbound.client import trusted_tls

UNPRIVILEGED_USER = 65534


def handshake(local: LocalCertificate, serving: ssl.SSLContext, host: str) -> None:
    """Do a TLS handshake in memory, with a client that trusts the local certificate as the daemon does."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    trusting = trusted_tls(local.certificate_file)
    # Python 3.13 and newer set both by default.
    trusting.verify_flags |= ssl.VERIFY_X509_STRICT | ssl.VERIFY_X509_PARTIAL_CHAIN
    client = trusting.wrap_bio(to_client, to_server, server_hostname=host)
    server = serving.wrap_bio(to_server, to_client, server_side=True)
    for _ in range(3):
        for side in (client, server):
            with contextlib.suppress(ssl.SSLWantReadError):
                side.do_handshake()
    assert client.version()


def signed_by_stolen_key(local: LocalCertificate, folder: Path, host: x509.GeneralName) -> ssl.SSLContext:
    """A server whose certificate for this host was signed with the key of the local certificate."""
    stolen = serialization.load_pem_private_key(local.key_file.read_bytes(), password=None)
    assert isinstance(stolen, ec.EllipticCurvePrivateKey)
    issuer = x509.load_pem_x509_certificate(local.certificate_file.read_bytes())
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder(issuer.subject, x509.Name([]), stolen.public_key(), 1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([host]), critical=True)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(stolen.public_key()), critical=False
        )
        .sign(stolen, hashes.SHA256())
    )
    chain = folder / "chain.pem"
    pem = serialization.Encoding.PEM
    chain.write_bytes(certificate.public_bytes(pem) + issuer.public_bytes(pem))
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain, local.key_file)
    return context


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "::1"])
def test_local_receiver_is_trusted(tmp_path: Path, host: str) -> None:
    """By each of its names, under the daemon's own verification."""
    local = LocalCertificate.in_folder(tmp_path)
    handshake(local, local.server_tls(), host)


@pytest.mark.parametrize("host", ["example.com", "localhost.example.com", "192.0.2.1", "::2"])
def test_certificate_is_not_valid_for_other_hosts(tmp_path: Path, host: str) -> None:
    """A server elsewhere cannot use the local certificate."""
    local = LocalCertificate.in_folder(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="mismatch"):
        handshake(local, local.server_tls(), host)


@pytest.mark.parametrize(
    ("host", "name"),
    [
        ("example.com", x509.DNSName("example.com")),
        ("192.0.2.1", x509.IPAddress(ip_address("192.0.2.1"))),
        ("localhost", x509.DNSName("localhost")),
    ],
)
def test_stolen_key_signs_nothing(tmp_path: Path, host: str, name: x509.GeneralName) -> None:
    """The local certificate is not an authority: a certificate signed with its key is not trusted."""
    local = LocalCertificate.in_folder(tmp_path)
    with pytest.raises(ssl.SSLCertVerificationError, match="invalid CA certificate"):
        handshake(local, signed_by_stolen_key(local, tmp_path, name), host)


@pytest.mark.parametrize(
    ("constant", "planted"),
    [
        ("_NAMES", x509.SubjectAlternativeName([x509.DNSName("example.com")])),
        ("_NO_AUTHORITY", x509.BasicConstraints(ca=True, path_length=None)),
    ],
)
def test_foreign_certificate_is_replaced(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    constant: str,
    planted: x509.ExtensionType,
) -> None:
    """The daemon would trust it for other hosts, or would trust whatever it signed."""
    with monkeypatch.context() as patch:
        patch.setattr(local_certificate, constant, planted)
        before = LocalCertificate.in_folder(tmp_path).certificate_file.read_bytes()
    local = LocalCertificate.in_folder(tmp_path)
    assert local.certificate_file.read_bytes() != before
    assert "is not limited to this machine; creating a new one" in caplog.text
    handshake(local, local.server_tls(), "localhost")


def test_folder_writable_by_others_is_refused(tmp_path: Path) -> None:
    """Another user could place a certificate there."""
    (tmp_path / "certificate").mkdir()
    (tmp_path / "certificate").chmod(0o777)
    with pytest.raises(ConfigurationError):
        LocalCertificate.in_folder(tmp_path)


def test_certificate_is_created_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A later start uses the same files, so a running daemon trusts a restarted receiver."""
    first = LocalCertificate.in_folder(tmp_path)
    before = first.certificate_file.read_bytes()
    second = LocalCertificate.in_folder(tmp_path)
    assert second.certificate_file.read_bytes() == before
    handshake(first, second.server_tls(), "localhost")
    assert caplog.text == ""


def test_two_processes_create_one_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second waits for the lock and uses the certificate of the first."""
    create = LocalCertificate._create
    both_creating = threading.Barrier(2)

    def create_together(local: LocalCertificate) -> None:
        with contextlib.suppress(threading.BrokenBarrierError):
            both_creating.wait(timeout=0.5)
        create(local)

    monkeypatch.setattr(LocalCertificate, "_create", create_together)
    with ThreadPoolExecutor(2) as threads:
        first, second = threads.map(LocalCertificate.in_folder, [tmp_path, tmp_path])
    assert both_creating.broken
    handshake(first, second.server_tls(), "localhost")


def test_lock_held_by_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process that holds the lock delays other processes for a bounded time."""
    LocalCertificate.in_folder(tmp_path)
    monkeypatch.setattr(local_certificate, "LOCK_TIMEOUT_SECONDS", 0.05)
    with (
        local_certificate._locked(tmp_path / "certificate"),
        pytest.raises(ConfigurationError, match="is locked by another process"),
    ):
        LocalCertificate.in_folder(tmp_path)


def test_files_are_private(tmp_path: Path) -> None:
    """Only the user can read the folder and its files; no temporary file is left."""
    LocalCertificate.in_folder(tmp_path).server_tls()
    folder = tmp_path / "certificate"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {file.name: stat.S_IMODE(file.stat().st_mode) for file in folder.iterdir()} == {
        "certificate.pem": 0o600,
        "key.pem": 0o600,
        "lock": 0o600,
    }


@pytest.mark.parametrize("content", [b"", b"\x00", b"-----BEGIN PRIVATE KEY-----\nAAAA\n"])
@pytest.mark.parametrize("name", ["certificate.pem", "key.pem"])
def test_damaged_file_is_replaced(
    tmp_path: Path, name: str, content: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """With a warning, because a running daemon still trusts the old certificate."""
    LocalCertificate.in_folder(tmp_path)
    (tmp_path / "certificate" / name).write_bytes(content)
    local = LocalCertificate.in_folder(tmp_path)
    handshake(local, local.server_tls(), "localhost")
    assert "is damaged; creating a new one" in caplog.text


def test_second_certificate_in_the_file_is_not_trusted(tmp_path: Path) -> None:
    """TLS would trust every certificate of the file."""
    other = LocalCertificate.in_folder(tmp_path / "other")
    local = LocalCertificate.in_folder(tmp_path)
    with local.certificate_file.open("ab") as file:
        file.write(other.certificate_file.read_bytes())
    LocalCertificate.in_folder(tmp_path)
    assert local.certificate_file.read_bytes().count(b"BEGIN CERTIFICATE") == 1


def test_key_of_another_certificate_is_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As after a crash between the writes of the two files."""
    other = LocalCertificate.in_folder(tmp_path / "other")
    local = LocalCertificate.in_folder(tmp_path)
    local.key_file.write_bytes(other.key_file.read_bytes())
    local = LocalCertificate.in_folder(tmp_path)
    handshake(local, local.server_tls(), "localhost")
    assert "is damaged; creating a new one" in caplog.text


@pytest.mark.parametrize("name", ["certificate.pem", "key.pem"])
def test_missing_file_is_created(tmp_path: Path, name: str) -> None:
    """Both files are created again, so that they match."""
    LocalCertificate.in_folder(tmp_path)
    (tmp_path / "certificate" / name).unlink()
    local = LocalCertificate.in_folder(tmp_path)
    handshake(local, local.server_tls(), "localhost")


def test_certificate_is_renewed_before_it_expires(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A receiver that runs for weeks does not serve an expired certificate."""
    with monkeypatch.context() as patch:
        patch.setattr(local_certificate, "VALID", timedelta(days=1))
        before = LocalCertificate.in_folder(tmp_path).certificate_file.read_bytes()
    assert LocalCertificate.in_folder(tmp_path).certificate_file.read_bytes() != before
    assert "has expired or expires soon; creating a new one" in caplog.text


@pytest.fixture
def as_another_user(tmp_path: Path) -> Iterator[None]:
    """Give up root's rights during the test; an ordinary user loses access to the folder instead."""
    LocalCertificate.in_folder(tmp_path)
    if os.geteuid() != 0:
        (tmp_path / "certificate").chmod(0o500)
        (tmp_path / "certificate" / "lock").chmod(0o000)
        yield
        (tmp_path / "certificate").chmod(0o700)
        return
    for folder in (tmp_path, *list(tmp_path.parents)[:2]):
        folder.chmod(0o755)
    os.seteuid(UNPRIVILEGED_USER)
    yield
    os.seteuid(0)


@pytest.mark.usefixtures("as_another_user")
def test_certificate_of_another_user_is_explained(tmp_path: Path) -> None:
    """In one line, with the remedy."""
    with pytest.raises(ConfigurationError, match=r"belongs to another user: use the same user for both .+"):
        LocalCertificate.in_folder(tmp_path)


def test_unusable_folder_is_explained(tmp_path: Path) -> None:
    """A file exists where the data folder should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"cannot be stored in .*: (Not a directory|File exists)"):
        LocalCertificate.in_folder(tmp_path / "file")
