"""How a worker goes over to another generation, when others of its job are replaced.

The scheduler asks every worker to give up the steps under way. The thread that trains notices at
its next wait, keeps the state after the last update, and listens anew; then the scheduler hears
what was kept, and tells all where to go on.
"""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import grpc

from chassis.channels import connect
from protos.stage_pb2 import Notice, ReadStateRequest, RegroupReply
from protos.stage_pb2_grpc import StageStub
from workers.errors import PeerLostError
from workers.links.inbox import Stopped
from workers.links.service import StageService
from workers.links.session import Session
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.kept import of_chunks

_GIVE_UP_S = 110.0  # for a worker in the midst of a micro-batch
_READ_S = 120.0
_SOON_S = 0.05


class Regroups:
    """Asked by the service's threads, answered by the one that trains.

    Args:
        service: of this worker.
        stop: ends the work early.
    """

    def __init__(self, service: StageService, stop: threading.Event) -> None:
        self._service = service
        self._stop = stop
        self._changed = threading.Condition()
        self._wanted = service.session.generation
        self._reply = RegroupReply()

    def ask(self, generation: int, back: bool = False) -> RegroupReply:
        """Have the worker come to a generation; what it has kept. May be repeated.

        Args:
            back: it is to keep nothing, nor to wait for a shard: one of them is lost.

        Raises:
            ValueError: it is of a later one.
            TimeoutError: it does not give up what it does.
        """
        with self._changed:
            if generation < self._service.session.generation:
                raise ValueError(
                    f"generation {generation}: this worker is of "
                    f"{self._service.session.generation}; expected no earlier one"
                )
            if generation > self._wanted:
                self._wanted = generation
                self._changed.notify_all()
        time.sleep(_SOON_S)  # all come to the step whose verdict is on its way
        while True:
            session = self._service.session
            if session.generation >= generation:
                return self._reply
            if back:
                session.go_back()
            session.inbox.close()
            with self._changed:
                there = self._changed.wait_for(
                    lambda: self._service.session is not session,  # noqa: B023
                    _GIVE_UP_S,
                )
            if not there:
                raise TimeoutError(f"no answer from the training within {_GIVE_UP_S:.0f} s")

    def is_due(self, session: Session) -> bool:
        """Whether a generation after that of a session was asked for."""
        return self._wanted > session.generation

    def wait(self, session: Session) -> int:
        """Wait until another generation is asked for; its number.

        Raises:
            Stopped: told to end first.
        """
        with self._changed:
            while self._wanted <= session.generation:
                if self._stop.is_set():
                    raise Stopped("stopped")
                self._changed.wait(0.1)
            return self._wanted

    def begin(
        self,
        session: Session,
        kept: Beginning | None,
        judged: Sequence[Notice],
        trained: int,
        line: int,
        *,
        in_doubt: bool,
        idle_s: float,
    ) -> None:
        """Be of another generation, with what was kept of those before.

        Args:
            judged: verdicts on the last steps.
            trained: the newest generation that it trained in.
            line: the last generation before that began at a cut.
            in_doubt: whether it lacks of the next step only the verdict.
            idle_s: seconds since the step that was kept had ended.
        """
        self._reply = RegroupReply(
            has_state=kept is not None,
            step=kept.step if kept is not None else 0,
            samples=kept.samples if kept is not None else 0,
            judged=judged,
            trained=trained,
            line=line,
            in_doubt=in_doubt,
            idle_s=idle_s,
        )
        self._service.begin(session)
        with self._changed:
            self._changed.notify_all()


def read_state(
    donor: str, request: ReadStateRequest, stopped: Callable[[], bool], folder: Path | None
) -> Beginning:
    """The training state that another worker of the stage has kept.

    Args:
        folder: for a file that it lies in; None: it is in memory.

    Raises:
        OSError: there is no room for it.
        PeerLostError: it cannot be had.
        Stopped: `stopped` said so.
    """

    def chunks() -> Iterator[bytes]:
        for chunk in StageStub(channel).ReadState(request, timeout=_READ_S):
            if stopped():
                raise Stopped("stopped")
            yield chunk.data

    with connect(donor) as channel:
        try:
            return of_chunks(chunks(), folder)
        except grpc.RpcError as error:
            raise PeerLostError(f"{donor}: its training state: {error}") from None
