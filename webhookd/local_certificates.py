"""What every certificate here is made of, the authority's and its servers'. Pure but for randomness."""

from datetime import datetime

from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID


def new_key() -> ec.EllipticCurvePrivateKey:
    """Cheap to make, and known to everybody."""
    return ec.generate_private_key(ec.SECP256R1())


def certificate_for(
    key: ec.EllipticCurvePrivateKey,
    subject: x509.Name,
    issuer: x509.Name,
    *,
    begins: datetime,
    ends: datetime,
    is_authority: bool,
) -> x509.CertificateBuilder:
    """To be extended, and signed. Python 3.13 and newer verify strictly, and miss the key identifiers."""
    public_key = key.public_key()
    return (
        x509.CertificateBuilder(issuer, subject, public_key, x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
        .add_extension(
            x509.BasicConstraints(ca=is_authority, path_length=0 if is_authority else None), critical=True
        )
        .add_extension(_key_usage(signs_certificates=is_authority), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public_key), critical=False)
    )


def by_issuer(key: ec.EllipticCurvePrivateKey) -> x509.AuthorityKeyIdentifier:
    """Which key signs."""
    return x509.AuthorityKeyIdentifier.from_issuer_public_key(key.public_key())


def name(common_name: str) -> x509.Name:
    """For people: what is verified are the alternative names."""
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common_name)])


def pem(key: ec.EllipticCurvePrivateKey, certificate: x509.Certificate) -> bytes:
    """Both, one below the other."""
    return key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    ) + certificate.public_bytes(serialization.Encoding.PEM)


def _key_usage(*, signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        encipher_only=False,
        decipher_only=False,
    )
