"""A certificate authority for the tests, and server certificates of each kind an endpoint may present.

Created once per session in a temporary folder. Only the tests trust it.
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

# The hosts of a good certificate. Only the tests' own resolver knows hooks.example and its subdomains.
HOSTS = ("localhost", "hooks.example", "*.hooks.example", "127.0.0.1", "::1")
ONE_DAY = timedelta(days=1)
PEM = serialization.Encoding.PEM


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
        authority = _Authority()
        ca_file = folder / "ca.pem"
        ca_file.write_bytes(authority.certificate.public_bytes(PEM))

        def write(kind: str, hosts: tuple[str, ...], expires: datetime, issuer: "_Authority | None") -> Path:
            path = folder / f"{kind}.pem"
            path.write_bytes(_server(hosts, expires, issuer))
            return path

        return cls(
            ca_file=ca_file,
            good=write("good", HOSTS, now + ONE_DAY, authority),
            expired=write("expired", HOSTS, now - timedelta(hours=1), authority),
            wrong_host=write("wrong_host", ("elsewhere.example",), now + ONE_DAY, authority),
            self_signed=write("self_signed", HOSTS, now + ONE_DAY, None),
        )


class _Authority:
    def __init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.name = _name("webhookd tests")
        expires = datetime.now(UTC) + 2 * ONE_DAY
        self.certificate = _builder(self.key, self.name, self.name, expires, is_authority=True).sign(
            self.key, hashes.SHA256()
        )


def _server(hosts: tuple[str, ...], expires: datetime, issuer: _Authority | None) -> bytes:
    """A key and its certificate as one PEM; self-signed without an issuer."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = _name(hosts[0])
    signing_key = issuer.key if issuer else key
    certificate = (
        _builder(key, name, issuer.name if issuer else name, expires, is_authority=False)
        .add_extension(x509.SubjectAlternativeName([_alternative(host) for host in hosts]), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(signing_key.public_key()), critical=False
        )
        .sign(signing_key, hashes.SHA256())
    )
    private = key.private_bytes(PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    return private + certificate.public_bytes(PEM)


def _builder(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    expires: datetime,
    *,
    is_authority: bool,
) -> x509.CertificateBuilder:
    """Python 3.13 and newer verify strictly and need the key usage and the key identifiers."""
    usage = {"key_cert_sign": is_authority, "crl_sign": is_authority, "digital_signature": not is_authority}
    unused = (
        *("content_commitment", "key_encipherment", "data_encipherment"),
        *("key_agreement", "encipher_only", "decipher_only"),
    )
    return (
        x509.CertificateBuilder(issuer, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(expires - 4 * ONE_DAY)
        .not_valid_after(expires)
        .add_extension(
            x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True
        )
        .add_extension(x509.KeyUsage(**usage, **dict.fromkeys(unused, False)), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _name(common_name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(host))
    except ValueError:
        return x509.DNSName(host)
