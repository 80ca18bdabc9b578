"""A certificate authority for this machine's own receivers, kept in a folder that only its user can read.

`serve --local` trusts it; `listen` and `demo` get certificates from it. It is constrained to the loopback
names: with its key, stolen, nobody can be anybody but localhost.
"""

import fcntl
import logging
import os
import ssl
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Self, TypeAlias

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID

from webhookd.core.errors import ConfigurationError
from webhookd.core.settings import LOOPBACK_NETWORKS
from webhookd.local_certificates import by_issuer, certificate_for, name, new_key, pem

log = logging.getLogger(__name__)

FOLDER = "authority"
# A reload asks for it too, and must not stand still for another's lock.
LOCK_TIMEOUT_SECONDS = 3.0
LOCK_POLL_SECONDS = 0.01
HOSTS: tuple[x509.GeneralName, ...] = (
    x509.DNSName("localhost"),
    x509.IPAddress(ip_address("127.0.0.1")),
    x509.IPAddress(ip_address("::1")),
)

# Long: a new one would be unknown to every daemon that runs, and this one opens nothing worth the trouble.
_AUTHORITY_VALID = timedelta(days=3650)
# Replaced this long before its end, so that no certificate of it outlives it.
_AUTHORITY_SPARE = timedelta(days=60)
# Made anew at each start of a receiver, which seldom runs for a month.
_CERTIFICATE_VALID = timedelta(days=30)
# For clocks that a restart or a virtual machine put back.
_CLOCK_SLACK = timedelta(hours=1)


class Authority:
    """The key and the certificate, and the file in which others find what to trust."""

    def __init__(self, folder: Path, key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> None:
        self.ca_file = folder / "ca.pem"
        self._folder = folder
        self._key = key
        self.certificate = certificate

    @classmethod
    def in_folder(cls, data_dir: Path) -> Self:
        """The authority of a data folder: found there, or made there once, also by two at a time."""
        folder = data_dir / FOLDER
        try:
            with _alone_in(folder):
                authority = cls(folder, *(_found(folder) or _made(folder)))
                _publish(authority.ca_file, authority.certificate)
                return authority
        except PermissionError as error:
            raise ConfigurationError(
                f"the local authority in {folder} belongs to another user:"
                " use the same user for both commands, or another data folder ([database] data_dir)"
            ) from error
        except OSError as error:
            raise ConfigurationError(
                f"the local authority cannot be kept in {folder}: {error.strerror}"
            ) from error

    def server_tls(self) -> ssl.SSLContext:
        """TLS for a server on this machine, with a certificate made for it now."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        # OpenSSL takes a key from a file alone: one that nobody else can read, and that is gone at once.
        with tempfile.NamedTemporaryFile(dir=self._folder, prefix="certificate.") as file:
            file.write(self.issue(HOSTS))
            file.flush()
            context.load_cert_chain(file.name)
        return context

    def issue(self, hosts: tuple[x509.GeneralName, ...]) -> bytes:
        """A new key and a certificate for these hosts, as one PEM."""
        key = new_key()
        now = datetime.now(UTC)
        certificate = (
            certificate_for(
                key,
                name("webhookd on this machine"),
                self.certificate.subject,
                begins=now - _CLOCK_SLACK,
                ends=now + _CERTIFICATE_VALID,
                is_authority=False,
            )
            .add_extension(x509.SubjectAlternativeName(hosts), critical=False)
            .add_extension(_FOR_SERVERS, critical=False)
            .add_extension(by_issuer(self._key), critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return pem(key, certificate)


_KeyPair: TypeAlias = tuple[ec.EllipticCurvePrivateKey, x509.Certificate]
_CONSTRAINTS = x509.NameConstraints(
    [x509.DNSName("localhost"), *(x509.IPAddress(ip_network(it)) for it in LOOPBACK_NETWORKS)], None
)
_FOR_SERVERS = x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH])


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock: whoever comes second finds what the first has made."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        # What others could put here would be trusted.
        raise PermissionError
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
        while not _locked(lock):
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the local authority in {folder} is held by another process")
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _found(folder: Path) -> _KeyPair | None:
    """What the file holds, unless it can no longer be used: that is said, and replaced."""
    try:
        kept = _kept(folder).read_bytes()
    except FileNotFoundError:
        return None
    try:
        key = serialization.load_pem_private_key(kept, password=None)
        certificate = x509.load_pem_x509_certificate(kept)
    except ValueError:
        log.warning("the local authority in %s was damaged, and is made anew", folder)
        return None
    if not isinstance(key, ec.EllipticCurvePrivateKey) or key.public_key() != certificate.public_key():
        log.warning("the local authority in %s was not of one piece, and is made anew", folder)
        return None
    if _constraints_of(certificate) != _CONSTRAINTS:
        log.warning("the local authority in %s was good for more than this machine, and is made anew", folder)
        return None
    if certificate.not_valid_after_utc - _AUTHORITY_SPARE < datetime.now(UTC):
        log.warning("the local authority in %s came to its end, and is made anew", folder)
        return None
    return key, certificate


def _constraints_of(certificate: x509.Certificate) -> x509.NameConstraints | None:
    try:
        return certificate.extensions.get_extension_for_class(x509.NameConstraints).value
    except x509.ExtensionNotFound:
        return None


def _made(folder: Path) -> _KeyPair:
    key = new_key()
    now = datetime.now(UTC)
    own_name = name("webhookd's authority for this machine alone")
    certificate = (
        certificate_for(
            key,
            own_name,
            own_name,
            begins=now - _CLOCK_SLACK,
            ends=now + _AUTHORITY_VALID,
            is_authority=True,
        )
        .add_extension(_CONSTRAINTS, critical=True)
        .add_extension(_FOR_SERVERS, critical=False)
        .sign(key, hashes.SHA256())
    )
    _write(_kept(folder), pem(key, certificate))
    return key, certificate


def _publish(ca_file: Path, certificate: x509.Certificate) -> None:
    """The certificate without the key. Written again if a crash came between the two files."""
    public = certificate.public_bytes(serialization.Encoding.PEM)
    if not ca_file.is_file() or ca_file.read_bytes() != public:
        _write(ca_file, public)


def _kept(folder: Path) -> Path:
    return folder / "authority.pem"


def _write(path: Path, content: bytes) -> None:
    """Whole or not at all, and for its user alone."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
