"""The certificate of receivers on this machine: self-signed, for localhost only, made once and kept.

`listen`, `demo` and `bench` serve with it; `serve --local` trusts it. It is not an authority (CA:FALSE): a
stolen key can impersonate localhost and sign nothing. (The authorities of `trustme` cannot be constrained to
names.)
"""

import fcntl
import logging
import os
import ssl
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from webhookd.core.errors import ConfigurationError

log = logging.getLogger(__name__)

FOLDER = "certificate"
# A reload of the daemon takes the lock too, and must not wait long for another process.
LOCK_TIMEOUT_SECONDS = 3.0
LOCK_POLL_SECONDS = 0.01
# Long, because a running daemon does not know a new certificate until it reloads.
VALID = timedelta(days=3650)
# Renewed this long before it expires, so that a running receiver never serves an expired certificate.
RENEW_BEFORE = timedelta(days=60)
# For a clock that a restart or a virtual machine has set back.
CLOCK_SLACK = timedelta(hours=1)

_LOOPBACK = [x509.IPAddress(ip_address(address)) for address in ("127.0.0.1", "::1")]
_NAMES = x509.SubjectAlternativeName([x509.DNSName("localhost"), *_LOOPBACK])
_NO_AUTHORITY = x509.BasicConstraints(ca=False, path_length=None)


@dataclass(frozen=True)
class LocalCertificate:
    """The certificate file for senders to trust, and the key file for receivers."""

    certificate_file: Path
    key_file: Path

    @classmethod
    def in_folder(cls, data_dir: Path) -> Self:
        """Load the certificate of a data folder, or create it. Safe for several processes at once."""
        folder = data_dir / FOLDER
        local = cls(folder / "certificate.pem", folder / "key.pem")
        try:
            with _locked(folder):
                if problem := local._problem():
                    if local.key_file.exists():
                        log.warning("the local certificate in %s %s; creating a new one", folder, problem)
                    local._create()
        except PermissionError as error:
            raise ConfigurationError(
                f"the local certificate in {folder} belongs to another user:"
                " use the same user for both commands, or another data folder ([database] data_dir)"
            ) from error
        except OSError as error:
            reason = f"the local certificate cannot be stored in {folder}: {error.strerror}"
            raise ConfigurationError(reason) from error
        return local

    def server_tls(self) -> ssl.SSLContext:
        """TLS settings for a receiver on this machine."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        context.load_cert_chain(self.certificate_file, self.key_file)
        return context

    def _problem(self) -> str | None:
        """Why the files cannot be used; None if they can."""
        try:
            # Exactly one: TLS would trust every certificate of the file.
            [certificate] = x509.load_pem_x509_certificates(self.certificate_file.read_bytes())
            extensions = certificate.extensions
            names = extensions.get_extension_for_class(x509.SubjectAlternativeName).value
            constraints = extensions.get_extension_for_class(x509.BasicConstraints).value
            self.server_tls()
        except FileNotFoundError:
            return "is incomplete"
        except (ValueError, ssl.SSLError, x509.ExtensionNotFound, x509.DuplicateExtension):
            return "is damaged"
        if (names, constraints) != (_NAMES, _NO_AUTHORITY):
            return "is not limited to this machine"
        if certificate.not_valid_after_utc - RENEW_BEFORE < datetime.now(UTC):
            return "has expired or expires soon"
        return None

    def _create(self) -> None:
        key = ec.generate_private_key(ec.SECP256R1())
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "webhookd on this machine")])
        now = datetime.now(UTC)
        certificate = (
            x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
            .not_valid_before(now - CLOCK_SLACK)
            .not_valid_after(now + VALID)
            .add_extension(_NO_AUTHORITY, critical=True)
            .add_extension(_NAMES, critical=False)
            .sign(key, hashes.SHA256())
        )
        pem, pkcs8 = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
        _write(self.key_file, key.private_bytes(pem, pkcs8, serialization.NoEncryption()))
        _write(self.certificate_file, certificate.public_bytes(pem))


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. Refuses a folder in which another user could place a certificate."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
        raise PermissionError
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    deadline = time.monotonic() + LOCK_TIMEOUT_SECONDS
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if time.monotonic() > deadline:
                raise ConfigurationError(f"the local certificate in {folder} is locked by another process")
            time.sleep(LOCK_POLL_SECONDS)
        yield
    finally:
        os.close(lock)


def _write(path: Path, content: bytes) -> None:
    """Replace the file in one step, readable by its user only."""
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f"{path.name}.", delete=False) as file:
        file.write(content)
    Path(file.name).replace(path)
