"""Small messages between the workers of a job: who has what of a step, and what becomes of it.

A notice is kept where it arrives until that step is over; whoever waits for one names it. A
worker's notice to itself takes no network.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from chassis.channels import RpcError, connect, status_of
from protos import stage_pb2
from protos.stage_pb2 import Notice, NoticeKind

Address = tuple[int, int]  # stage and rank

_TIMEOUT_S = 120.0


class NoticeBoard:
    """What others have told this worker.

    Args:
        wake: called after each notice, for those who wait.

    Attributes:
        on_notice: called after each notice, before anybody is woken.
    """

    def __init__(self, wake: Callable[[], None]) -> None:
        self.on_notice: Callable[[], None] | None = None
        self._wake = wake
        self._lock = threading.Lock()
        self._notices: dict[tuple[NoticeKind.ValueType, int], dict[Address, Notice]] = {}

    def put(self, notice: Notice) -> None:
        """Take a notice; a repeated one changes nothing."""
        with self._lock:
            told = self._notices.setdefault((notice.kind, notice.step), {})
            told[notice.stage, notice.rank] = notice
        if self.on_notice is not None:
            self.on_notice()
        self._wake()

    def of(self, kind: NoticeKind.ValueType, step: int) -> dict[Address, Notice]:
        """Notices of a kind about a step, by sender."""
        with self._lock:
            return dict(self._notices.get((kind, step), {}))

    def has(self, kind: NoticeKind.ValueType, step: int) -> bool:
        """Whether anybody has told so."""
        return (kind, step) in self._notices

    def count(self, kind: NoticeKind.ValueType, step: int) -> int:
        """How many have told so."""
        return len(self._notices.get((kind, step), ()))

    def forget_before(self, step: int) -> None:
        """Drop the notices about steps before this one, which are of no more use."""
        with self._lock:
            for key in [key for key in self._notices if key[1] < step]:
                del self._notices[key]


class Notices:
    """Tells other workers, without waiting for their answers.

    Args:
        own: stage and rank of this worker.
        stages: addresses of all workers, by stage and rank.
        board: this worker's.
    """

    def __init__(self, own: Address, stages: Sequence[Sequence[str]], board: NoticeBoard) -> None:
        self.board = board
        self._own = own
        self._stages = stages
        self._lock = threading.Lock()
        self._channels: dict[Address, tuple[grpc.Channel, Any]] = {}
        self._outstanding: deque[tuple[Address, Any]] = deque()

    def tell(self, to: Address, kind: NoticeKind.ValueType, step: int, **facts: Any) -> None:
        """Tell a worker about a step.

        Raises:
            RpcError: an earlier notice could not be delivered.
        """
        stage, rank = self._own
        notice = Notice(kind=kind, step=step, stage=stage, rank=rank, **facts)
        if to == self._own:
            self.board.put(notice)
            return
        with self._lock:
            self._settle()
            if to not in self._channels:
                channel = connect(self._stages[to[0]][to[1]])
                method = channel.unary_unary(
                    "/heterps.v1.Stage/Tell",
                    request_serializer=Notice.SerializeToString,
                    response_deserializer=stage_pb2.NoticeReply.FromString,
                )
                self._channels[to] = channel, method
            future = self._channels[to][1].future(notice, timeout=_TIMEOUT_S)
            self._outstanding.append((to, future))

    def check(self) -> None:
        """Raise what could not be delivered.

        Raises:
            RpcError: that.
        """
        with self._lock:
            self._settle()

    def flush(self) -> None:
        """Wait until all that was told has arrived.

        Raises:
            RpcError: something could not be delivered.
        """
        with self._lock:
            self._settle(all_=True)

    def close(self) -> None:
        """Close the channels."""
        with self._lock:
            for channel, _ in self._channels.values():
                channel.close()

    def _settle(self, all_: bool = False) -> None:
        while self._outstanding and (all_ or self._outstanding[0][1].done()):
            (stage, rank), future = self._outstanding.popleft()
            try:
                future.result()
            except grpc.RpcError as error:
                code, details = status_of(error)
                raise RpcError(f"stage {stage} worker {rank}", code, details) from None
