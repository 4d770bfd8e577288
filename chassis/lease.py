"""The lease that a node or a standing shard holds with the scheduler: renewed while it lives."""

import logging
import random
from collections.abc import Callable

import grpc

from chassis.channels import RpcError, call, connect
from chassis.loops import Loop, Loops
from protos.scheduler_pb2 import HeartbeatReply, HeartbeatRequest, NodeStatus
from protos.scheduler_pb2_grpc import SchedulerStub

INTERVAL_S = 1.0
_MAX_PAUSE_S = 2.0  # below the lease, so that a scheduler that is back knows us soon
_TIMEOUT_S = 3.0
_log = logging.getLogger("heterps.lease")
_chance = random.Random()  # our own: in a worker, who draws from Python's is a model


class Lease:
    """Renews a lease on a thread of its own; rides out a scheduler that is away.

    Args:
        scheduler: address of the scheduler.
        status: what to tell it; called on the lease's thread, must be quick.
        interval_s: seconds between renewals.
        answered: called with each answer; quick as well.
        loops: of the process, that the thread is to be one of.
    """

    def __init__(
        self,
        scheduler: str,
        status: Callable[[], NodeStatus],
        interval_s: float = INTERVAL_S,
        answered: Callable[[HeartbeatReply], object] = lambda reply: None,
        loops: Loops | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._status = status
        self._interval = interval_s
        self._answered = answered
        self._wanted = scheduler
        self._channel: grpc.Channel = connect(scheduler)
        self._stub = SchedulerStub(self._channel)
        self._loops = loops or Loops()
        self._loop: Loop | None = None
        self._pause_s = interval_s
        self._is_away = self._is_closed = False

    def start(self, wait_s: float = 10.0, stop: Callable[[], bool] | None = None) -> None:
        """Take the lease, waiting up to `wait_s` for the scheduler; then keep renewing it.

        Raises:
            RpcError: no scheduler answered, or it refused.
        """
        self._beat(retry_s=wait_s, stop=stop)
        self._loop = self._loops.start("lease", self._renew, self._interval)

    def kick(self) -> None:
        """Renew now: something worth knowing has changed."""
        if self._loop is not None:
            self._loop.kick()

    def move(self, scheduler: str) -> None:
        """Renew with another scheduler from the next time on."""
        self._wanted = scheduler
        self.kick()

    def close(self) -> None:
        """Give the lease back, if the scheduler can be reached; safe to repeat."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._loop is not None:
            self._loop.close(_TIMEOUT_S)
        try:
            self._beat(leaving=True, timeout_s=1.0)
        except RpcError as error:
            _log.info("left without a goodbye: %s", error)
        self._channel.close()

    def _beat(
        self,
        *,
        leaving: bool = False,
        retry_s: float = 0.0,
        timeout_s: float = _TIMEOUT_S,
        stop: Callable[[], bool] | None = None,
    ) -> None:
        reply = call(
            self._stub.Heartbeat,
            HeartbeatRequest(node=self._status(), leaving=leaving),
            what=f"scheduler {self._scheduler}: renew the lease",
            timeout_s=timeout_s,
            retry_s=retry_s,
            stop=stop,
        )
        self._answered(reply)

    def _renew(self) -> float:
        """Renew once; seconds until the next time."""
        if self._wanted != self._scheduler:
            _log.info("scheduler %s takes over from %s", self._wanted, self._scheduler)
            self._channel.close()  # nobody else calls through it
            self._scheduler, self._channel = self._wanted, connect(self._wanted)
            self._stub = SchedulerStub(self._channel)
        try:
            self._beat()
        except RpcError as error:
            if not self._is_away:
                _log.warning("%s; trying on", error)
            self._is_away = True
            self._pause_s = min(self._pause_s * 1.5, _MAX_PAUSE_S) * _chance.uniform(0.5, 1.0)
            return self._pause_s
        if self._is_away:
            _log.info("scheduler %s is back", self._scheduler)
        self._pause_s, self._is_away = self._interval, False
        return self._pause_s
