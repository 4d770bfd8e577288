"""Tells the scheduler how far a worker is, and learns from it whether to go on."""

import logging
import threading
from collections.abc import Mapping

from protos.channels import RpcError, call, connect
from protos.node_pb2 import LaunchRequest
from protos.scheduler_pb2 import ProgressReport
from protos.scheduler_pb2_grpc import SchedulerStub
from workers.executor import Progress

_log = logging.getLogger("heterps.progress")


class Reporter:
    """Reports every `interval_s` on a thread of its own; sets `stop` when told to."""

    def __init__(
        self, launch: LaunchRequest, total_steps: int, stop: threading.Event, interval_s: float
    ) -> None:
        self._launch = launch
        self._total = total_steps
        self._stop = stop
        self._interval = interval_s
        self._channel = connect(launch.scheduler)
        self._stub = SchedulerStub(self._channel)
        self._progress: Progress | None = None
        self._closed = threading.Event()
        self._seen = (0, 0.0)
        self._thread = threading.Thread(target=self._loop, name="report", daemon=True)

    def follow(self, progress: Progress) -> None:
        """Begin to report."""
        self._progress = progress
        self._thread.start()

    def send(
        self,
        phase: str | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        error: str = "",
        output: str = "",
        retry_s: float = 10.0,
    ) -> None:
        """Report now; a scheduler that is away for `retry_s` is an error.

        Raises:
            RpcError: the scheduler cannot be reached.
        """
        report = ProgressReport(
            job_id=self._launch.job_id,
            stage=self._launch.index,
            rank=self._launch.rank,
            total_steps=self._total,
            error=error,
            output=output,
            metrics=dict(metrics or {}),
        )
        progress = self._progress
        if progress is not None:
            report.phase = progress.phase
            report.step, report.samples = progress.step, progress.samples
            report.busy_s, report.train_seconds = progress.busy_s, progress.train_seconds
            recent = progress.losses[-50:]
            report.loss = sum(recent) / len(recent) if recent else 0.0
            samples, seconds = report.samples, report.train_seconds
            before_samples, before_seconds = self._seen
            if seconds > before_seconds:
                report.samples_per_s = (samples - before_samples) / (seconds - before_seconds)
            self._seen = (samples, seconds)
        if phase is not None:
            report.phase = phase
        reply = call(
            self._stub.Report,
            report,
            what=f"scheduler {self._launch.scheduler}: report progress",
            timeout_s=5.0,
            retry_s=retry_s,
        )
        if reply.stop:
            self._stop.set()

    def close(self) -> None:
        """Stop reporting."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        self._channel.close()

    def _loop(self) -> None:
        while not self._closed.wait(self._interval):
            try:
                self.send(retry_s=0.0)
            except RpcError as error:
                _log.warning("%s", error)
