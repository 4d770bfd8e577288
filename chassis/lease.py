"""The lease that a node or a standing shard holds with the scheduler: renewed while it lives."""

import logging
import random
import threading
from collections.abc import Callable

import grpc

from chassis.channels import RpcError, call, connect
from protos.scheduler_pb2 import HeartbeatReply, HeartbeatRequest, NodeStatus
from protos.scheduler_pb2_grpc import SchedulerStub

INTERVAL_S = 1.0
_MAX_PAUSE_S = 2.0  # below the lease, so that a scheduler that is back knows us soon
_TIMEOUT_S = 3.0
_log = logging.getLogger("heterps.lease")


class Lease:
    """Renews a lease on a thread of its own; rides out a scheduler that is away.

    Args:
        scheduler: address of the scheduler.
        status: what to tell it; called on the lease's thread, must be quick.
        interval_s: seconds between renewals.
        answered: called with each answer; quick as well.
    """

    def __init__(
        self,
        scheduler: str,
        status: Callable[[], NodeStatus],
        interval_s: float = INTERVAL_S,
        answered: Callable[[HeartbeatReply], object] = lambda reply: None,
    ) -> None:
        self._scheduler = scheduler
        self._status = status
        self._interval = interval_s
        self._answered = answered
        self._wanted = scheduler
        self._channel: grpc.Channel = connect(scheduler)
        self._stub = SchedulerStub(self._channel)
        self._wake = threading.Event()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="lease", daemon=True)

    def start(self, wait_s: float = 10.0, stop: Callable[[], bool] | None = None) -> None:
        """Take the lease, waiting up to `wait_s` for the scheduler; then keep renewing it.

        Raises:
            RpcError: no scheduler answered, or it refused.
        """
        self._beat(retry_s=wait_s, stop=stop)
        self._thread.start()

    def kick(self) -> None:
        """Renew now: something worth knowing has changed."""
        self._wake.set()

    def move(self, scheduler: str) -> None:
        """Renew with another scheduler from the next time on."""
        self._wanted = scheduler
        self.kick()

    def close(self) -> None:
        """Give the lease back, if the scheduler can be reached; safe to repeat."""
        if self._closed.is_set():
            return
        self._closed.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_TIMEOUT_S)
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

    def _loop(self) -> None:
        pause, away = self._interval, False
        while True:
            self._wake.wait(pause)
            self._wake.clear()
            if self._closed.is_set():
                return
            if self._wanted != self._scheduler:
                _log.info("scheduler %s takes over from %s", self._wanted, self._scheduler)
                self._channel.close()  # nobody else calls through it
                self._scheduler, self._channel = self._wanted, connect(self._wanted)
                self._stub = SchedulerStub(self._channel)
            try:
                self._beat()
                if away:
                    _log.info("scheduler %s is back", self._scheduler)
                pause, away = self._interval, False
            except RpcError as error:
                if not away:
                    _log.warning("%s; trying on", error)
                away = True
                pause = min(pause * 1.5, _MAX_PAUSE_S) * random.uniform(0.5, 1.0)
