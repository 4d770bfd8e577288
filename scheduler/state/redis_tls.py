"""How Redis is spoken to: with TLS and a password wherever others could listen."""

import os
import ssl
from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs, urlsplit

from chassis.security import AUTHORITY, SecurityError, is_loopback


def require(url: str, allow_plain: bool = False) -> None:
    """Refuse a server beyond this machine without TLS and a password.

    Args:
        url: of redis:// or rediss://; others are left to whoever opens them.
        allow_plain: let all pass.

    Raises:
        SecurityError: it would be spoken to in the clear, or without a password.
    """
    parts = urlsplit(url)
    host = parts.hostname or ""
    if parts.scheme not in ("redis", "rediss") or is_loopback(host) or allow_plain:
        return
    if parts.scheme != "rediss":
        raise SecurityError(
            f"redis {host}: {parts.scheme}:// sends jobs and the password in the clear; expected "
            "rediss:// (the server's CA in HETERPS_TLS_CA), or --allow-plain-redis where nobody "
            "else is on the network between"
        )
    if not parts.password:
        raise SecurityError(
            f"redis {host}: whoever reaches it could run code; expected rediss://:PASSWORD@{host}"
        )


def options(url: str, environment: Mapping[str, str] = os.environ) -> dict[str, Any]:
    """What redis-py is to be told beside the URL, whose own parameters win.

    Returns:
        For rediss://, verification of certificate and host name, against HETERPS_TLS_CA where it
        is set; else nothing.
    """
    parts = urlsplit(url)
    if parts.scheme != "rediss":
        return {}
    wanted: dict[str, Any] = {
        "ssl_cert_reqs": "required",
        "ssl_check_hostname": True,
        "ssl_min_version": ssl.TLSVersion.TLSv1_2,
    }
    if authority := environment.get(AUTHORITY):
        wanted["ssl_ca_certs"] = authority
    given = parse_qs(parts.query)
    return {name: value for name, value in wanted.items() if name not in given}
