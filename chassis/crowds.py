"""No address takes all connections of a server: those beyond its share are closed.

gRPC bounds connections together and tells nothing of each, so the process looks at its own sockets.
Where there is no /proc, nothing is looked at.
"""

import ipaddress
import logging
import os
import socket
import threading
from collections import defaultdict
from contextlib import suppress

_FILES = "/proc/self/fd"
_NETWORK = 8  # bytes of an IPv6 address that one person has all of
_log = logging.getLogger("heterps.server")


def watch(port: int, share: int, every_s: float, stopped: threading.Event) -> None:
    """Do `close_crowd` again and again, on a thread of its own."""

    def look() -> None:
        while not stopped.wait(every_s):
            if closed := close_crowd(port, share):
                _log.warning("closed %d connections: more than %d of one address", closed, share)

    threading.Thread(target=look, name="crowd", daemon=True).start()


def close_crowd(port: int, share: int) -> int:
    """Close the newest connections of each address that has more than its share; how many.

    Args:
        port: that the server listens on.
        share: connections of one address.
    """
    try:
        names = os.listdir(_FILES)
    except OSError:
        return 0
    if len(names) <= share:
        return 0
    found: dict[bytes, list[tuple[int, int]]] = defaultdict(list)
    for name in names:
        with suppress(OSError):
            address = _peer(int(name), port)
            if address:
                found[address].append((os.fstat(int(name)).st_ino, int(name)))
    closed = 0
    for address, sockets in found.items():
        for _, file in sorted(sockets)[share:]:  # the numbers of sockets grow
            with suppress(OSError):
                closed += _peer(file, port, to_close=address) == address
    return closed


def _peer(file: int, port: int, to_close: bytes = b"") -> bytes:
    """Who is connected to a port by this file; empty where it is no such connection.

    Args:
        to_close: whose connection is to be closed.

    Raises:
        OSError: it is no socket.
    """
    descriptor = os.dup(file)  # which stays what it is, whatever others do with the file
    try:
        copy = socket.socket(fileno=descriptor)
    except OSError:
        os.close(descriptor)
        raise
    with copy:
        if copy.family not in (socket.AF_INET, socket.AF_INET6) or copy.getsockname()[1] != port:
            return b""
        address = owner(copy.getpeername()[0])
        if address == to_close:
            copy.shutdown(socket.SHUT_RDWR)
        return address


def owner(host: str) -> bytes:
    """Whom an address belongs to: of IPv6 the network.

    Raises:
        ValueError: it is no address.
    """
    address = ipaddress.ip_address(host.partition("%")[0])
    if isinstance(address, ipaddress.IPv6Address):
        mapped = address.ipv4_mapped
        return address.packed[:_NETWORK] if mapped is None else mapped.packed
    return address.packed
