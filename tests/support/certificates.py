"""A local certificate authority, and a server certificate of each kind that an endpoint may show.

Made once a session in a temporary folder. Nobody but the tests trusts it.
"""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization

from webhookd.local_certificates import by_issuer, certificate_for, name, new_key, pem

# The hosts of a good certificate. hooks.example and its children are names for a resolver of the test's own.
HOSTS = ("localhost", "hooks.example", "*.hooks.example", "127.0.0.1", "::1")
ONE_DAY = timedelta(days=1)


@dataclass(frozen=True)
class Certificates:
    """Files: the authority to trust, and certificates with their keys to serve with."""

    ca_file: Path
    good: Path
    expired: Path
    wrong_host: Path
    self_signed: Path

    @classmethod
    def make(cls, folder: Path) -> Self:
        """Write all of them into a folder."""
        now = datetime.now(UTC)
        authority = _Issuer()
        ca_file = folder / "ca.pem"
        ca_file.write_bytes(authority.certificate.public_bytes(serialization.Encoding.PEM))

        def serve(kind: str, hosts: tuple[str, ...], until: datetime, issuer: "_Issuer | None") -> Path:
            path = folder / f"{kind}.pem"
            path.write_bytes(_server(hosts, until, issuer))
            return path

        return cls(
            ca_file=ca_file,
            good=serve("good", HOSTS, now + ONE_DAY, authority),
            expired=serve("expired", HOSTS, now - timedelta(hours=1), authority),
            wrong_host=serve("wrong_host", ("elsewhere.example",), now + ONE_DAY, authority),
            self_signed=serve("self_signed", HOSTS, now + ONE_DAY, None),
        )


class _Issuer:
    """The authority: its key and its certificate."""

    def __init__(self) -> None:
        self.key = new_key()
        now = datetime.now(UTC)
        self.name = name("webhookd's tests")
        self.certificate = certificate_for(
            self.key,
            self.name,
            self.name,
            begins=now - 2 * ONE_DAY,
            ends=now + 2 * ONE_DAY,
            is_authority=True,
        ).sign(self.key, hashes.SHA256())


def _server(hosts: tuple[str, ...], until: datetime, issuer: _Issuer | None) -> bytes:
    """A key and a certificate for it, as one PEM; signed by itself without an issuer."""
    key = new_key()
    own_name = name(hosts[0])
    signing_key = issuer.key if issuer else key
    certificate = (
        certificate_for(
            key,
            own_name,
            issuer.name if issuer else own_name,
            begins=until - 2 * ONE_DAY,
            ends=until,
            is_authority=False,
        )
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(by_issuer(signing_key), critical=False)
        .sign(signing_key, hashes.SHA256())
    )
    return pem(key, certificate)


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
