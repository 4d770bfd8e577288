"""Tells the scheduler how far a worker is, and learns from it whether to go on."""

import logging
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import grpc
from google.protobuf.message import DecodeError

from chassis.channels import RpcError, call, connect
from protos.node_pb2 import LaunchRequest
from protos.scheduler_pb2 import (
    END_UNSPECIFIED,
    CutList,
    EndReason,
    ProgressReport,
    ReportReply,
)
from protos.scheduler_pb2_grpc import SchedulerStub
from workers.stage.report.progress import Progress

AWAY_S = 300.0  # how long a worker's last word waits for a scheduler
_RECENT = 50  # steps that the loss is told of
_PAUSE_S = 0.5
_VALIDATED = 16  # of the latest validations the scheduler is told
_AWAY = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
_log = logging.getLogger("heterps.progress")


class Reporter:
    """Reports every `interval_s` on a thread of its own; sets `stop` when told to.

    Args:
        source: the file that `launch` was read from; a node writes the address of a scheduler
            that takes over into it.
    """

    def __init__(
        self,
        launch: LaunchRequest,
        total_steps: int,
        stop: threading.Event,
        interval_s: float,
        source: Path | None = None,
    ) -> None:
        self._launch = launch
        self._source = source
        self._scheduler = launch.scheduler
        self._calling = threading.Lock()
        self._total = total_steps
        self._stop = stop
        self._interval = interval_s
        self._channel = connect(self._scheduler)
        self._stub = SchedulerStub(self._channel)
        self._progress: Progress | None = None
        self._closed = threading.Event()
        self._seen = (0, 0.0)
        self._told_cuts: CutList | None = None
        self._thread = threading.Thread(target=self._loop, name="report", daemon=True)
        self._generation = launch.generation

    @property
    def scheduler(self) -> str:
        """The address of the one that is reported to now."""
        return self._scheduler

    def begin(self, generation: int) -> None:
        """Be of another generation of the job's workers, of whose progress nothing is known yet."""
        # In this order: nobody tells of a generation what another has come to.
        self._progress = None
        self._generation = generation

    def follow(self, progress: Progress) -> None:
        """Report of this from now on."""
        self._progress, self._seen = progress, (progress.samples, 0.0)
        if not self._thread.is_alive():
            self._thread.start()

    def send(
        self,
        phase: str | None = None,
        *,
        metrics: Mapping[str, float] | None = None,
        error: str = "",
        end_reason: EndReason.ValueType = END_UNSPECIFIED,
        output: str = "",
        retry_s: float = AWAY_S,
    ) -> None:
        """Report now; a scheduler that is away for `retry_s` is an error.

        Raises:
            RpcError: the scheduler cannot be reached, or `stop` was set meanwhile.
        """
        report = ProgressReport(
            job_id=self._launch.job_id,
            attempt=self._launch.attempt,
            generation=self._generation,
            stage=self._launch.index,
            rank=self._launch.rank,
            total_steps=self._total,
            error=error,
            end_reason=end_reason,
            output=output,
        )
        progress = self._progress
        if progress is not None:
            report.phase = progress.phase
            report.step, report.samples = progress.step, progress.samples
            report.metrics.update(metrics or progress.metrics)
            for one in progress.validated[-_VALIDATED:]:
                report.validated.add(step=one.step, metrics=one.metrics)
            report.busy_s, report.train_seconds = progress.busy_s, progress.train_seconds
            report.stepped_s, report.before_s = progress.stepped_s, progress.before_s
            report.apart_s = progress.apart_s
            cuts = progress.cuts
            if cuts is not None and cuts is not self._told_cuts:
                report.cuts.CopyFrom(cuts)
            report.loss, terms = progress.curve.recent(_RECENT)
            report.loss_terms.update(terms)
            samples, seconds = report.samples, report.train_seconds
            before_samples, before_seconds = self._seen
            if seconds > before_seconds:
                report.samples_per_s = (samples - before_samples) / (seconds - before_seconds)
            self._seen = (samples, seconds)
        if phase is not None:
            report.phase = phase
        give_up = time.monotonic() + retry_s
        while True:
            try:
                reply = self._call(report)
                break
            except RpcError as failure:
                if failure.code not in _AWAY or time.monotonic() > give_up:
                    raise
                if self._stop.wait(_PAUSE_S):
                    raise
        if progress is not None and report.HasField("cuts"):
            self._told_cuts = cuts
            if not reply.stop:
                progress.cuts_told = cuts
        if reply.stop:
            self._stop.set()

    def _call(self, report: ProgressReport) -> ReportReply:
        with self._calling:
            try:
                return call(
                    self._stub.Report,
                    report,
                    what=f"scheduler {self._scheduler}: report progress",
                    timeout_s=5.0,
                )
            except RpcError as error:
                if error.code not in _AWAY:
                    raise
                self._look_for_another()
                raise

    def _look_for_another(self) -> None:
        """Turn to the scheduler that has taken over, if this node knows of one."""
        try:
            address = (
                LaunchRequest.FromString(self._source.read_bytes()).scheduler
                if self._source is not None
                else ""
            )
        except (OSError, DecodeError):
            return
        if address and address != self._scheduler:
            _log.info("scheduler %s takes over from %s", address, self._scheduler)
            self._channel.close()
            self._told_cuts = None
            self._scheduler, self._channel = address, connect(address)
            self._stub = SchedulerStub(self._channel)

    def close(self) -> None:
        """Stop reporting."""
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        self._channel.close()

    def _loop(self) -> None:
        while not self._closed.wait(self._interval):
            if self._progress is None:
                continue
            try:
                self.send(retry_s=0.0)
            except RpcError as error:
                _log.warning("%s", error)
