"""Who may listen where, and what a caller must show.

Loopback is open to the machine's own processes. Any other bind demands TLS and a token; both
sides read them from files named in the environment (HETERPS_TLS_CERT, HETERPS_TLS_KEY,
HETERPS_TLS_CA, HETERPS_TOKEN_FILE).
"""

import ipaddress
import os
import ssl
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from chassis import tls

CERTIFICATE, KEY = "HETERPS_TLS_CERT", "HETERPS_TLS_KEY"
AUTHORITY, TOKEN = "HETERPS_TLS_CA", "HETERPS_TOKEN_FILE"
VARIABLES = (CERTIFICATE, KEY, AUTHORITY, TOKEN)
# The name that every server's certificate is checked for, in place of the host it is called by. All
# servers of a cluster hold one certificate: what it proves is the cluster, and hosts come and go.
NAME = "HETERPS_TLS_NAME"


class SecurityError(RuntimeError):
    """A bind or a credential that must not be used."""


@dataclass(frozen=True, slots=True)
class Security:
    """TLS files, the shared token, and the name to check; all None means loopback only."""

    certificate: bytes | None = None
    key: bytes | None = None
    authority: bytes | None = None
    token: str | None = None
    name: str | None = None

    @staticmethod
    def from_environment() -> "Security":
        """Read the files that the environment names.

        Raises:
            SecurityError: a named file cannot be read, or only half of a pair is given.
        """
        return replace(Security.from_files(os.environ), name=os.environ.get(NAME) or None)

    @staticmethod
    def from_files(
        files: Mapping[str, str], named: Callable[[str], str] = lambda variable: variable
    ) -> "Security":
        """Read files.

        Args:
            files: paths by the variable that would name them; others are left alone.
            named: what to call the source of a variable's path in errors.

        Raises:
            SecurityError: as `from_environment`.
        """
        certificate = _read(files, CERTIFICATE, named)
        key = _read(files, KEY, named)
        if (certificate is None) != (key is None):
            raise SecurityError(
                f"{named(CERTIFICATE)} and {named(KEY)} go together; one is missing"
            )
        token = _read(files, TOKEN, named)
        text = token.decode(errors="replace").strip() if token is not None else None
        if text is not None and len(text) < 16:
            raise SecurityError(f"{named(TOKEN)}: the token is shorter than 16 characters")
        return Security(certificate, key, _read(files, AUTHORITY, named), text)

    def require_for(self, host: str) -> None:
        """Refuse a bind that others could reach unless TLS and a token protect it."""
        if is_loopback(host) or (self.certificate and self.token):
            return
        raise SecurityError(
            f"refusing to listen on {host}: other machines could reach it. Set HETERPS_TLS_CERT, "
            "HETERPS_TLS_KEY and HETERPS_TOKEN_FILE (heterps certs makes them), or bind 127.0.0.1"
        )

    def server_credentials(self) -> grpc.ServerCredentials | None:
        """TLS for a server, or None for plain loopback.

        Raises:
            SecurityError: no client would accept the certificate: it has expired.
        """
        if self.certificate is None or self.key is None:
            return None
        try:
            tls.check_dates(self.certificate)
        except tls.CertificateError as error:
            raise SecurityError(f"{CERTIFICATE}: {error}") from None
        return grpc.ssl_server_credentials([(self.key, self.certificate)])

    def tls_server(self) -> ssl.SSLContext | None:
        """The same for sockets of our own."""
        if self.certificate is None or self.key is None:
            return None
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # What resumes sessions: the client would have to read for it.
        context.num_tickets = 0
        with tempfile.NamedTemporaryFile() as both:  # ssl reads these from files alone
            both.write(self.key + b"\n" + self.certificate)
            both.flush()
            context.load_cert_chain(both.name)
        return context

    def tls_client(self) -> ssl.SSLContext | None:
        """What checks such a server's certificate, and its name, by the authority of channels."""
        if self.authority is None:
            return None
        context = ssl.create_default_context(cadata=self.authority.decode())
        context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC takes what it would refuse
        return context

    def channel(self, address: str, options: list[tuple[str, Any]]) -> grpc.Channel:
        """A channel to `address` with TLS where an authority is configured."""
        credentials = self._channel_credentials()
        if credentials is None:  # loopback: require_for guards the server
            return grpc.insecure_channel(address, options)
        options = self._named(options)
        return grpc.secure_channel(address, credentials, options)

    def channel_async(self, address: str, options: list[tuple[str, Any]]) -> grpc.aio.Channel:
        """The same for coroutines."""
        credentials = self._channel_credentials()
        if credentials is None:
            return grpc.aio.insecure_channel(address, options)
        return grpc.aio.secure_channel(address, credentials, self._named(options))

    def _named(self, options: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
        if self.name is None:
            return options
        return [*options, ("grpc.ssl_target_name_override", self.name)]

    def _channel_credentials(self) -> grpc.ChannelCredentials | None:
        if self.authority is None:
            return None
        credentials = grpc.ssl_channel_credentials(self.authority)
        if self.token is None:
            return credentials
        return grpc.composite_channel_credentials(
            credentials, grpc.access_token_call_credentials(self.token)
        )

    @property
    def asked_token(self) -> str | None:
        """What callers of a server must show; None on plain loopback: it needs TLS to travel."""
        return self.token if self.certificate else None


def is_loopback(host: str) -> bool:
    """Whether only processes of this machine can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def _read(files: Mapping[str, str], variable: str, named: Callable[[str], str]) -> bytes | None:
    path = files.get(variable)
    if not path:
        return None
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise SecurityError(
            f"{named(variable)}={path}: {error.strerror}; expected a readable file"
        ) from None
