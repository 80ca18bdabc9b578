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
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

# The hosts of a good certificate. hooks.example and its children are names for a resolver of the test's own.
HOSTS = ("localhost", "hooks.example", "*.hooks.example", "127.0.0.1", "::1")
ONE_DAY = timedelta(days=1)

# Cheap to make, and enough for a day.
_CURVE = ec.SECP256R1()


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

        def serve(name: str, hosts: tuple[str, ...], until: datetime, issuer: "_Issuer | None") -> Path:
            path = folder / f"{name}.pem"
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
        self.key = ec.generate_private_key(_CURVE)
        now = datetime.now(UTC)
        self.name = _name("webhookd's tests")
        public_key = self.key.public_key()
        self.certificate = (
            x509.CertificateBuilder(self.name, self.name, public_key, x509.random_serial_number())
            .not_valid_before(now - 2 * ONE_DAY)
            .not_valid_after(now + 2 * ONE_DAY)
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .add_extension(_key_usage(signs_certificates=True), critical=True)
            # Python 3.13 and newer verify strictly, and miss the key identifiers.
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
            .sign(self.key, hashes.SHA256())
        )


def _server(hosts: tuple[str, ...], until: datetime, issuer: _Issuer | None) -> bytes:
    """A key and a certificate for it, as one PEM; signed by itself without an issuer."""
    key = ec.generate_private_key(_CURVE)
    name = _name(hosts[0])
    signing_key = issuer.key if issuer else key
    issuer_name = issuer.name if issuer else name
    certificate = (
        x509.CertificateBuilder(issuer_name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(until - 2 * ONE_DAY)
        .not_valid_after(until)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False
        )
        .sign(signing_key, hashes.SHA256())
    )
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=True,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
