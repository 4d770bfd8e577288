"""A certificate authority, a certificate and a token, for clusters beyond one machine."""

import datetime
import ipaddress
import secrets
import socket
from collections.abc import Iterable
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from chassis.files import replace_file
from heterps.errors import HeterpsError

CA, CERTIFICATE, KEY, TOKEN = "ca.pem", "server.pem", "server-key.pem", "token"
FILES = (CA, CERTIFICATE, KEY, TOKEN)
_DAYS = 825  # what clients commonly accept at most
_LOCAL = ("localhost", "127.0.0.1", "::1")
CLUSTER = "heterps.internal"  # in every certificate, for HETERPS_TLS_NAME


def make(
    directory: Path, hosts: Iterable[str] = (), days: int = _DAYS, *, replace: bool = False
) -> dict[str, str]:
    """Write all files of `FILES` into `directory`, readable by the owner alone.

    The authority's key is not kept: to add hosts, make everything anew.

    Args:
        hosts: names and addresses that servers are called by, besides this machine's own.
        replace: whether files that are there are made anew.

    Returns:
        The environment that uses them.

    Raises:
        HeterpsError: one of the files is there already, or cannot be written.
    """
    directory = directory.absolute()
    for name in () if replace else FILES:
        if (directory / name).exists():
            raise HeterpsError(
                f"{directory / name}: exists; expected a folder without it, or --force to replace"
                " it and the others (every process of the cluster must then be restarted)"
            )
    names = list(dict.fromkeys([*hosts, socket.gethostname(), *_LOCAL, CLUSTER]))
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _authority(authority_key, days)
    key = ec.generate_private_key(ec.SECP256R1())
    certificate = _certificate(key, names, authority, authority_key, days)
    contents = {
        CA: authority.public_bytes(serialization.Encoding.PEM),
        CERTIFICATE: certificate.public_bytes(serialization.Encoding.PEM),
        KEY: key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        ),
        TOKEN: secrets.token_urlsafe(32).encode() + b"\n",
    }
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, content in contents.items():
            replace_file(directory / name, content, private=True)
    except OSError as error:
        raise HeterpsError(
            f"{error.filename}: {error.strerror}; expected a folder to write to"
        ) from None
    return environment(directory)


def environment(directory: Path) -> dict[str, str]:
    """The variables that make every role and client use the files."""
    return {
        "HETERPS_TLS_CA": str(directory / CA),
        "HETERPS_TLS_CERT": str(directory / CERTIFICATE),
        "HETERPS_TLS_KEY": str(directory / KEY),
        "HETERPS_TOKEN_FILE": str(directory / TOKEN),
    }


def names(certificate: bytes) -> set[str]:
    """The host names and addresses of a certificate in PEM."""
    try:
        parsed = x509.load_pem_x509_certificate(certificate)
        found = parsed.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except (ValueError, x509.ExtensionNotFound):
        return set()
    addresses = {str(one) for one in found.get_values_for_type(x509.IPAddress)}
    return addresses | set(found.get_values_for_type(x509.DNSName))


def _builder(
    subject: str, issuer: x509.Name, key: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(_name(subject))
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    name = _name("HeterPS cluster authority")
    identifier = x509.SubjectKeyIdentifier.from_public_key(key.public_key())
    return (
        _builder("HeterPS cluster authority", name, key.public_key(), days)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_usage(signs_certificates=True), critical=True)
        .add_extension(identifier, critical=False)
        .sign(key, hashes.SHA256())
    )


def _certificate(
    key: ec.EllipticCurvePrivateKey,
    hosts: list[str],
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    days: int,
) -> x509.Certificate:
    issuer = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    return (
        _builder("HeterPS server", authority.subject, key.public_key(), days)
        .add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_usage(signs_certificates=False), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer, critical=False)
        .sign(authority_key, hashes.SHA256())
    )


def _usage(*, signs_certificates: bool) -> x509.KeyUsage:
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


def _name(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _host(text: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(text.strip("[]")))
    except ValueError:
        pass
    try:
        return x509.DNSName(text)
    except ValueError:
        raise HeterpsError(f"--host {text}: expected a host name or an IP address") from None
