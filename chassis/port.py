"""Where others connect to a process: gRPC introduces, sockets of our own carry.

Workers of a job ask each other, and clients a shard, over gRPC with TLS and token, where they may
connect: a Unix socket for those of its host and user, a port for others, which speaks TLS where the
servers do. Whoever connects shows the secret that the answer held. A call of gRPC's takes some ten
times as long as a message here, on a core that has other things to do.
"""

import contextlib
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable

from chassis.sealed import Sealed
from chassis.security import Security

CALL_S = 120.0  # on a host whose cores are all busy with starting
_GREETING_S = 10.0  # whoever says nothing keeps no thread
_GREETINGS = 16  # at once: others wait to be taken in
_PAUSE_S = 0.1
_SECRET = 32
_BUFFER = 4 << 20  # bytes that the kernel holds of a connection
_PEER = struct.Struct("3i")  # process, user, group


class Port:
    """Takes in those who show the secret.

    Args:
        host: of the process' gRPC server.
        take: called with each connection, by a thread of its own; closes what it refuses.
        port: for others' hosts; 0 for any free one.
        bulk: whether TLS is to be that of `chassis.sealed`.
        near: what the name of a Unix socket for those of this host begins with; empty: none.

    Attributes:
        host: as given.
        number: the port.
        name: of the Unix socket; empty where there is none.
        secret: what is to be shown at either.

    Raises:
        SecurityError: others could reach it, and it would speak in the clear.
        OSError: the port is in use, or the host is not this machine's.
    """

    def __init__(
        self,
        host: str,
        take: Callable[[socket.socket], object],
        security: Security | None = None,
        *,
        port: int = 0,
        bulk: bool = False,
        near: str = "",
    ) -> None:
        security = security or Security.from_environment()
        security.require_for(host)
        self.host = host
        self._take = take
        self._bulk = bulk
        self._tls = security.tls_server()
        self._greetings = threading.Semaphore(_GREETINGS)
        self.secret = secrets.token_bytes(_SECRET)
        self.name = ""
        bare = host.strip("[]")
        family = socket.getaddrinfo(bare, None, type=socket.SOCK_STREAM)[0][0]
        # Of all addresses of IPv6 those of IPv4 are some, for gRPC, too.
        both = bare == "::" and socket.has_dualstack_ipv6()
        far = socket.create_server((bare, port), family=family, dualstack_ipv6=both)
        self._listening = [far]
        self.number: int = far.getsockname()[1]
        if near and sys.platform == "linux":  # the sockets are abstract: no file outlives us
            self.name = f"{near}-{secrets.token_hex(16)}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind(f"\0{self.name}")
            local.listen()
            self._listening.append(local)
        for listening in self._listening:
            threading.Thread(
                target=self._accept, args=(listening,), name="port accepts", daemon=True
            ).start()

    def close(self) -> None:
        """Take nobody in any more; safe to repeat."""
        for listening in self._listening:
            with contextlib.suppress(OSError):
                listening.shutdown(socket.SHUT_RDWR)  # wakes `accept`
            listening.close()

    def _accept(self, listening: socket.socket) -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                if listening.fileno() < 0:  # closed
                    return
                time.sleep(_PAUSE_S)  # no descriptor was left, say
                continue
            self._greetings.acquire()
            welcoming = threading.Thread(
                target=self._welcome, args=(connection,), name="port welcomes", daemon=True
            )
            try:
                welcoming.start()
            except RuntimeError:  # no thread is left
                self._greetings.release()
                connection.close()
                time.sleep(_PAUSE_S)

    def _welcome(self, connection: socket.socket) -> None:
        until = time.monotonic() + _GREETING_S
        try:
            connection.settimeout(_GREETING_S)
            if connection.family == socket.AF_UNIX:
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                if _PEER.unpack(peer)[1] != os.geteuid():
                    raise PermissionError("another user")
            elif self._tls is not None:
                if self._bulk:
                    connection = Sealed(connection, self._tls)
                else:
                    connection = self._tls.wrap_socket(connection, server_side=True)
            shown = b""
            while len(shown) < _SECRET:
                more = connection.recv(_SECRET - len(shown))
                if not more:
                    raise ConnectionError("closed")
                shown += more
                connection.settimeout(max(0.01, until - time.monotonic()))
            if not secrets.compare_digest(shown, self.secret):
                raise PermissionError("a wrong secret")
            connection.settimeout(None)
        except OSError:  # of TLS, too
            connection.close()
            return
        finally:
            self._greetings.release()
        self._take(connection)


def reach_near(name: str, secret: bytes) -> socket.socket:
    """A connection to the Unix socket of a process.

    Raises:
        OSError: there is none of that name on this host.
    """
    near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        near.connect(f"\0{name}")
        return _greeted(near, secret)
    except BaseException:
        near.close()
        raise


def reach(
    host: str,
    port: int,
    secret: bytes,
    security: Security | None = None,
    timeout_s: float = CALL_S,
    *,
    bulk: bool = False,
) -> socket.socket:
    """A connection to the port of a process, in TLS where an authority is configured.

    Args:
        host: of it, as others call it; its certificate has to name it.
        timeout_s: until it is there.
        bulk: as the port's.

    Raises:
        OSError: it cannot be reached.
    """
    security = security or Security.from_environment()
    far = socket.create_connection((host.strip("[]"), port), timeout_s)
    try:
        far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        context = security.tls_client()
        if context is not None:
            name = security.name or host.strip("[]")
            if bulk:
                far = Sealed(far, context, name)
            else:
                far = context.wrap_socket(far, server_hostname=name)
        return _greeted(far, secret)
    except BaseException:
        far.close()
        raise


def _greeted(connection: socket.socket, secret: bytes) -> socket.socket:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
    connection.sendall(secret)
    return connection
