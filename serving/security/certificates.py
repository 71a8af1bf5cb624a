"""A private certificate authority for one installation: edge and server prove themselves with it.

Keys are on the curve P-256. Files appear whole, keys with mode 0600.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal, Self

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tasks.kernel.errors import ConfigurationError
from tasks.kernel.files import make_folder, write_atomically

BACKDATED = timedelta(minutes=5)
"""Clocks of two machines differ."""
Use = Literal["server", "client"]
_USES = {"server": ExtendedKeyUsageOID.SERVER_AUTH, "client": ExtendedKeyUsageOID.CLIENT_AUTH}


@dataclass(frozen=True)
class Pair:
    """Files of a certificate and its key."""

    certificate: Path
    key: Path

    @classmethod
    def at(cls, folder: Path, name: str) -> Self:
        """`<name>.pem` and `<name>.key` in a folder."""
        return cls(folder / f"{name}.pem", folder / f"{name}.key")

    @property
    def exists(self) -> bool:
        """True where both files are there."""
        return self.certificate.is_file() and self.key.is_file()


def ensure_authority(folder: Path, name: str) -> Pair:
    """An authority that signs certificates of this installation; made where there is none."""
    pair = Pair.at(folder, name)
    if pair.exists:
        return pair
    key = ec.generate_private_key(ec.SECP256R1())
    subject = _name(f"Falaj {name}")
    builder = (
        _builder(subject, subject, key, 3650)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage(signs_certificates=True), critical=True)
    )
    _write(pair, builder.sign(key, hashes.SHA256()), key)
    return pair


def ensure_certificate(
    folder: Path, name: str, authority: Pair, hosts: Sequence[str], use: Use
) -> Pair:
    """A certificate for these hosts, made again in its last month or when hosts were added.

    Args:
        hosts: DNS names and IP addresses; the first is the common name.

    Raises:
        ConfigurationError: the authority cannot be read.
    """
    pair = Pair.at(folder, name)
    if pair.exists and _is_good(pair, authority, hosts):
        return pair
    signer, signer_key = _read(authority)
    key = ec.generate_private_key(ec.SECP256R1())
    names = x509.SubjectAlternativeName([_general_name(host) for host in hosts])
    issuer_id = x509.AuthorityKeyIdentifier.from_issuer_public_key(signer_key.public_key())
    builder = (
        _builder(_name(hosts[0]), signer.subject, key, 397)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([_USES[use]]), critical=False)
        .add_extension(names, critical=False)
        .add_extension(issuer_id, critical=False)
    )
    _write(pair, builder.sign(signer_key, hashes.SHA256()), key)
    return pair


def expires_at(certificate: Path) -> datetime:
    """When a certificate ends.

    Raises:
        ConfigurationError: it cannot be read.
    """
    return _certificate(certificate).not_valid_after_utc


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.now(UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - BACKDATED)
        .not_valid_after(now + timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _key_usage(signs_certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        digital_signature=not signs_certificates,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=signs_certificates,
        crl_sign=signs_certificates,
        encipher_only=False,
        decipher_only=False,
    )


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _is_good(pair: Pair, authority: Pair, hosts: Sequence[str]) -> bool:
    found = _certificate(pair.certificate)
    names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    signer = _certificate(authority.certificate)
    return (
        found.not_valid_after_utc > datetime.now(UTC) + timedelta(days=30)
        and all(_general_name(host) in names for host in hosts)
        and found.issuer == signer.subject
    )


def _read(pair: Pair) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    try:
        key = serialization.load_pem_private_key(pair.key.read_bytes(), password=None)
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"authority key {pair.key} cannot be read: {exc}") from exc
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ConfigurationError(f"authority key {pair.key} is on no elliptic curve")
    return _certificate(pair.certificate), key


def _certificate(file: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(file.read_bytes())
    except (OSError, ValueError) as exc:
        raise ConfigurationError(f"certificate {file} cannot be read: {exc}") from exc


def _write(pair: Pair, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    plain = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    make_folder(pair.key.parent)
    content = certificate.public_bytes(serialization.Encoding.PEM)
    write_atomically(pair.key, plain, private=True)
    write_atomically(pair.certificate, content, private=True)
