"""The gRPC service of one worker: where the others are, where they connect, what it has kept."""

import threading
from collections.abc import Callable, Iterable, Iterator

import grpc

from chassis.servers import Server
from protos import stage_pb2, stage_pb2_grpc
from workers.links.session import ENDING, Session

SERVICE = "heterps.v1.Stage"
_THREADS = 6  # of which one may wait for the worker to give up its steps


class StageService(stage_pb2_grpc.StageServicer):
    """Receives the topology of each generation, and brings those who send to its session.

    Args:
        session: of the first generation.

    Attributes:
        on_regroup: given the number of another generation and whether all go back, has the worker
            give up its steps; returns once it has, and tells what it has kept. None: it cannot.
        kept: its training state after so many updates, if it has kept that, in small pieces.
        on_pause: has all workers wait after a step; None: it cannot, or does not train.
    """

    def __init__(self, session: Session) -> None:
        self.on_regroup: Callable[[int, bool], stage_pb2.RegroupReply] | None = None
        self.kept: Callable[[int], Iterable[bytes] | None] = lambda step: None
        self.on_pause: Callable[[], None] | None = None
        self._session = session
        self._changed = threading.Condition()
        self._topology: stage_pb2.Topology | None = None
        self._host = ""
        self._server: Server | None = None

    @property
    def address(self) -> str:
        """Where it is served."""
        return self._server.address if self._server is not None else ""

    @property
    def session(self) -> Session:
        """Of the newest generation."""
        return self._session

    def begin(self, session: Session) -> None:
        """Go over to another generation, which takes nothing of the one before."""
        self._session.close()
        self.on_pause = None
        session.open(self._host)
        with self._changed:
            self._session = session
            self._changed.notify_all()

    def wait_for_topology(self, timeout_s: float) -> stage_pb2.Topology | None:
        """Where the workers of this generation are, once all of them listen."""
        with self._changed:
            self._changed.wait_for(self._has_topology, timeout_s)
            return self._topology if self._has_topology() else None

    def serve(self, bind: str) -> None:
        """Listen on host:port."""
        self._host = bind.rpartition(":")[0]
        self._session.open(self._host)
        self._server = Server("stage", bind, threads=_THREADS)
        self._server.add(stage_pb2_grpc.add_StageServicer_to_server, self, SERVICE)
        self._server.start()

    def stop(self, grace_s: float) -> None:
        """Take nothing more."""
        self._session.close()
        if self._server is not None:
            self._server.stop(grace_s)

    def Start(  # noqa: N802
        self, request: stage_pb2.Topology, context: grpc.ServicerContext
    ) -> stage_pb2.StartReply:
        """Begin; a repeated call changes nothing, nor does one of a generation that is over."""
        with self._changed:
            if request.generation > self._session.generation:
                context.abort(
                    grpc.StatusCode.FAILED_PRECONDITION,
                    f"generation {request.generation} begins, and this worker is of "
                    f"{self._session.generation}; expected Regroup first",
                )
            if request.generation == self._session.generation and not self._has_topology():
                self._topology = request
                self._changed.notify_all()
        return stage_pb2.StartReply()

    def Regroup(  # noqa: N802
        self, request: stage_pb2.RegroupRequest, context: grpc.ServicerContext
    ) -> stage_pb2.RegroupReply:
        """Give up the steps under way."""
        if self.on_regroup is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker cannot regroup")
        try:
            return self.on_regroup(request.generation, request.back)
        except (ValueError, TimeoutError) as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))

    def Pause(  # noqa: N802
        self, request: stage_pb2.PauseRequest, context: grpc.ServicerContext
    ) -> stage_pb2.PauseReply:
        """Have all workers wait after a step."""
        self._of(request.generation, context)
        if self.on_pause is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker does not train")
        self.on_pause()
        return stage_pb2.PauseReply()

    def ReadState(  # noqa: N802
        self, request: stage_pb2.ReadStateRequest, context: grpc.ServicerContext
    ) -> Iterator[stage_pb2.StateChunk]:
        """Send the state that was kept after some step."""
        data = self.kept(request.step)
        if data is None:
            text = f"this worker has no state after {request.step} updates"
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, text)
        for chunk in data:
            yield stage_pb2.StateChunk(data=chunk)

    def Connect(  # noqa: N802
        self, request: stage_pb2.ConnectRequest, context: grpc.ServicerContext
    ) -> stage_pb2.JoinReply:
        """Tell another worker of the job where it may connect."""
        session = self._of(request.generation, context)
        reply = session.reply
        if reply is None:
            context.abort(grpc.StatusCode.UNAVAILABLE, ENDING)
        return reply

    def Join(  # noqa: N802
        self, request: stage_pb2.JoinRequest, context: grpc.ServicerContext
    ) -> stage_pb2.JoinReply:
        """Tell the worker before this one where it may connect to make a ring."""
        session = self._of(request.generation, context)
        if session.port is None:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, "this worker is alone in its stage")
        try:
            return session.port.admit(request)
        except ValueError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))

    def _has_topology(self) -> bool:
        told = self._topology
        return told is not None and told.generation == self._session.generation

    def _of(self, generation: int, context: grpc.ServicerContext) -> Session:
        """The session, for a caller of the same generation."""
        session = self._session
        if generation != session.generation:
            text = f"this worker is of generation {session.generation}, the caller {generation}"
            later = generation > session.generation  # this worker may come to it
            code = grpc.StatusCode.UNAVAILABLE if later else grpc.StatusCode.FAILED_PRECONDITION
            context.abort(code, text)
        return session
