"""How a stage's workers come to be a ring: gRPC introduces, sockets of our own carry.

Each worker asks the next rank, over its stage service with TLS and token, where it may connect: a
Unix socket for workers of its host and user, a port for others, which speaks TLS where the servers
do. Whoever connects shows the secret that the answer held. A call of gRPC's took some ten times as
long as a message here, and a small sum makes two for each worker.
"""

import contextlib
import os
import secrets
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence

from chassis.channels import call, connect
from chassis.security import Security
from protos.stage_pb2 import JoinReply, JoinRequest
from protos.stage_pb2_grpc import StageStub
from workers.errors import PeerLostError
from workers.links.inbox import Stopped
from workers.links.ring import SILENCE_S, Ring

JOIN_S = 300.0  # within which the worker before must have come
_CALL_S = 120.0  # on a host whose cores are all busy with starting
_RETRY_S = 30.0
_GREETING_S = 10.0  # whoever says nothing keeps no thread
_GREETINGS = 16  # at once: others wait to be taken in
_PAUSE_S = 0.1
_SECRET = 32
_BUFFER = 4 << 20  # bytes that the kernel holds of a connection
_PEER = struct.Struct("3i")  # process, user, group


class RingPort:
    """Where the worker before this one connects.

    Args:
        rank: of this worker.
        size: workers of the stage.
        host: of the stage's server.

    Raises:
        SecurityError: others could reach it, and it would speak in the clear.
    """

    def __init__(self, rank: int, size: int, host: str, security: Security | None = None) -> None:
        self.rank = rank
        self.size = size
        self._security = security or Security.from_environment()
        self._security.require_for(host)
        self._tls = self._security.tls_server()
        self._secret = secrets.token_bytes(_SECRET)
        self._greetings = threading.Semaphore(_GREETINGS)
        self._came = threading.Condition()
        self._connection: socket.socket | None = None
        family = socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][0]
        far = socket.create_server((host.strip("[]"), 0), family=family)
        self._listening = [far]
        self._reply = JoinReply(address=f"{host}:{far.getsockname()[1]}", secret=self._secret)
        if sys.platform == "linux":  # the sockets are abstract: no file outlives the worker
            near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            near.bind(f"\0heterps-ring-{secrets.token_hex(16)}")
            near.listen()
            self._listening.append(near)
            self._reply.name = near.getsockname()[1:].decode()
        for listening in self._listening:
            threading.Thread(
                target=self._accept, args=(listening,), name="ring accepts", daemon=True
            ).start()

    def admit(self, request: JoinRequest) -> JoinReply:
        """Where and how the worker before this one connects; it may ask again.

        Raises:
            ValueError: it is another.
        """
        before = (self.rank - 1) % self.size
        if (request.rank, request.size) != (before, self.size):
            raise ValueError(
                f"worker {request.rank} of {request.size} joins worker {self.rank} of {self.size}; "
                f"expected worker {before} of {self.size}"
            )
        return self._reply

    def join(self, reply: JoinReply, host: str, stop: Callable[[], bool], **options: int) -> Ring:
        """Connect to the next rank, and wait until the one before has connected.

        Args:
            reply: what the next rank's `admit` answered.
            host: of that rank, as others call it.
            options: of `Ring`.

        Raises:
            PeerLostError: the next cannot be reached, or the one before did not come.
            Stopped: `stop` said so.
        """
        try:
            after = self._connected(reply, host)
        except OSError as error:
            text = f"worker {(self.rank + 1) % self.size} of the stage, at {host}: {error}"
            raise PeerLostError(text) from error
        try:
            before = self._taken(stop)
        except BaseException:
            after.close()
            raise
        self._stop_listening()
        return Ring(self.rank, self.size, before, after, stop, **options)

    def close(self) -> None:
        """Take nobody in any more; the ring, once made, is its own."""
        self._stop_listening()

    def _taken(self, stop: Callable[[], bool]) -> socket.socket:
        until = time.monotonic() + JOIN_S
        with self._came:
            while self._connection is None:
                if stop():
                    raise Stopped("stopped")
                if time.monotonic() > until:
                    before = (self.rank - 1) % self.size
                    raise PeerLostError(
                        f"worker {before} of the stage did not connect within {JOIN_S:.0f} s"
                    )
                self._came.wait(0.2)
            return self._connection

    def _stop_listening(self) -> None:
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
            threading.Thread(
                target=self._welcome, args=(connection,), name="ring welcomes", daemon=True
            ).start()

    def _welcome(self, connection: socket.socket) -> None:
        until = time.monotonic() + _GREETING_S
        try:
            connection.settimeout(_GREETING_S)
            if connection.family == socket.AF_UNIX:
                peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
                if _PEER.unpack(peer)[1] != os.geteuid():
                    raise PermissionError("another user")
            elif self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            shown = b""
            while len(shown) < _SECRET:
                more = connection.recv(_SECRET - len(shown))
                if not more:
                    raise ConnectionError("closed")
                shown += more
                connection.settimeout(max(0.01, until - time.monotonic()))
            if not secrets.compare_digest(shown, self._secret):
                raise PermissionError("a wrong secret")
            with self._came:
                if self._connection is not None:
                    raise ConnectionError("the worker before has connected already")
                self._connection = connection
                self._came.notify_all()
        except OSError:  # of TLS, too
            connection.close()
        finally:
            self._greetings.release()

    def _connected(self, reply: JoinReply, host: str) -> socket.socket:
        if reply.name and host == self._reply.address.rpartition(":")[0]:
            near = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                near.connect(f"\0{reply.name}")
                return self._greeted(near, reply.secret)
            except OSError:  # the same name, yet another host
                near.close()
        port = int(reply.address.rpartition(":")[2])
        far = socket.create_connection((host.strip("[]"), port), _CALL_S)
        try:
            far.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            context = self._security.tls_client()
            if context is not None:
                name = self._security.name or host.strip("[]")
                far = context.wrap_socket(far, server_hostname=name)
            return self._greeted(far, reply.secret)
        except BaseException:
            far.close()
            raise

    @staticmethod
    def _greeted(connection: socket.socket, secret: bytes) -> socket.socket:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER)
        connection.sendall(secret)
        return connection


def join_stage(port: RingPort, addresses: Sequence[str], stop: Callable[[], bool]) -> Ring:
    """The ring of a stage's workers.

    Args:
        addresses: of their stage services, by rank.

    Raises:
        RpcError: the next rank's service cannot be reached or refuses.
        PeerLostError, Stopped
    """
    after = addresses[(port.rank + 1) % port.size]
    with connect(after) as channel:
        reply: JoinReply = call(
            StageStub(channel).Join,
            JoinRequest(rank=port.rank, size=port.size),
            what=f"worker {(port.rank + 1) % port.size} at {after}: join",
            timeout_s=_CALL_S,
            retry_s=_RETRY_S,
            stop=stop,
        )
    return port.join(reply, after.rpartition(":")[0], stop)


def local_rings(size: int, stop: Callable[[], bool], silence_s: int = SILENCE_S) -> list[Ring]:
    """The rings of workers that are threads of one process, by rank."""
    ports = [RingPort(rank, size, "127.0.0.1") for rank in range(size)]
    rings: list[Ring | None] = [None] * size

    def join(port: RingPort) -> None:
        after = ports[(port.rank + 1) % size]
        reply = after.admit(JoinRequest(rank=port.rank, size=size))
        rings[port.rank] = port.join(reply, "127.0.0.1", stop, silence_s=silence_s)

    threads = [threading.Thread(target=join, args=(port,)) for port in ports]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [ring for ring in rings if ring is not None]
