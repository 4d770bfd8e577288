"""What is wrong with TLS, in words: a certificate before it is used, a handshake that failed."""

import datetime
import logging

_SOON = datetime.timedelta(days=14)
_log = logging.getLogger("heterps.tls")
# What gRPC says of a failed handshake, and what it means; the first that is found counts.
_HANDSHAKES = (
    (
        "certificate has expired",
        "its certificate has expired; expected a new one (`heterps certs DIR --force`)",
    ),
    (
        "certificate is not yet valid",
        "its certificate is not valid yet; expected clocks that agree",
    ),
    (
        "Hostname Verification Check failed",
        "its certificate does not name this host; expected one made with `heterps certs --host` "
        "for the name or address that it is called by",
    ),
    (
        "CERTIFICATE_VERIFY_FAILED",
        "its certificate is not of the authority in HETERPS_TLS_CA; expected the CA of its cluster",
    ),
    (
        "WRONG_VERSION_NUMBER",
        "it speaks no TLS, and HETERPS_TLS_CA demands it; expected a server with TLS, or no CA for "
        "one on loopback",
    ),
)


class CertificateError(ValueError):
    """A certificate that nobody would accept."""


def handshake_problem(details: str) -> str:
    """Why a server was not reached, from gRPC's details; empty when TLS is not the reason."""
    return next((words for sign, words in _HANDSHAKES if sign in details), "")


def check_dates(certificate: bytes, now: datetime.datetime | None = None) -> None:
    """See that a certificate is valid now; warn when it soon will not be.

    Args:
        certificate: in PEM.
        now: None for the clock's time.

    Raises:
        CertificateError: it is not, or it is no certificate.
    """
    from cryptography import x509

    try:
        parsed = x509.load_pem_x509_certificate(certificate)
    except ValueError:
        raise CertificateError("expected a certificate in PEM") from None
    now = now or datetime.datetime.now(datetime.UTC)
    first, last = parsed.not_valid_before_utc, parsed.not_valid_after_utc
    if now > last:
        raise CertificateError(
            f"the certificate has expired on {last:%Y-%m-%d}; expected a new one "
            "(`heterps certs DIR --force`, then restart every process of the cluster)"
        )
    if now < first:
        raise CertificateError(
            f"the certificate is valid from {first:%Y-%m-%d %H:%M} UTC on; expected a clock that "
            "is right"
        )
    if last - now < _SOON:
        _log.warning("the certificate expires on %s; make new ones in time", f"{last:%Y-%m-%d}")
