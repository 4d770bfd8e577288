"""How a stage's workers come to be a ring: each connects to the port of the next rank."""

import socket
import threading
import time
from collections.abc import Callable, Sequence

from chassis.channels import call, connect
from chassis.port import CALL_S, Port
from chassis.security import Security
from protos.stage_pb2 import JoinReply, JoinRequest
from protos.stage_pb2_grpc import StageStub
from workers.errors import PeerLostError
from workers.links.inbox import Stopped
from workers.links.joining import NEAR, reach, reply_of
from workers.links.ring import SILENCE_S, Ring

JOIN_S = 300.0  # within which the worker before must have come
_RETRY_S = 30.0


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
        self._came = threading.Condition()
        self._connection: socket.socket | None = None
        self._port = Port(host, self._take, self._security, near=NEAR)

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
        return reply_of(self._port)

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
            after = reach(reply, host, self._port.host, self._security)
        except OSError as error:
            text = f"worker {(self.rank + 1) % self.size} of the stage, at {host}: {error}"
            raise PeerLostError(text) from error
        try:
            before = self._taken(stop)
        except BaseException:
            after.close()
            raise
        self.close()
        return Ring(self.rank, self.size, before, after, stop, **options)

    def close(self) -> None:
        """Take nobody in any more; the ring, once made, is its own."""
        self._port.close()

    def _take(self, connection: socket.socket) -> None:
        with self._came:
            if self._connection is not None:  # the worker before has connected already
                connection.close()
                return
            self._connection = connection
            self._came.notify_all()

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


def join_stage(
    port: RingPort, addresses: Sequence[str], stop: Callable[[], bool], generation: int = 0
) -> Ring:
    """The ring of a stage's workers.

    Args:
        addresses: of their stage services, by rank.
        generation: of the job's workers.

    Raises:
        RpcError: the next rank's service cannot be reached or refuses.
        PeerLostError, Stopped
    """
    after = addresses[(port.rank + 1) % port.size]
    with connect(after) as channel:
        reply: JoinReply = call(
            StageStub(channel).Join,
            JoinRequest(rank=port.rank, size=port.size, generation=generation),
            what=f"worker {(port.rank + 1) % port.size} at {after}: join",
            timeout_s=CALL_S,
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
