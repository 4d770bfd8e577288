"""TensorBoard event files of a job, made from what the scheduler keeps of its history.

They are written by whoever looks rather than by the job: the files are then where TensorBoard is,
nodes need neither the package nor a shared disk, and a job that has ended can be written as well.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from chassis import written
from heterps.client.records import Job
from heterps.errors import HeterpsError

if TYPE_CHECKING:
    from heterps.client.client import Client
    from protos.history_pb2 import JobHistory, StagePoint

_EVERY_S = 2.0


class EventWriter:
    """Writes the points of a job that are new, each with the time at which it was reported.

    Args:
        directory: of the job's events; made where it is missing.

    Raises:
        HeterpsError: the package `tensorboard` is not installed, or the folder cannot be written.
    """

    def __init__(self, directory: Path) -> None:
        try:
            from tensorboard.summary.writer.event_file_writer import EventFileWriter
        except ModuleNotFoundError:
            raise HeterpsError(
                "event files need the package tensorboard; install it with "
                "`pip install 'heterps[tensorboard]'`"
            ) from None
        try:
            written.claim(directory)
            self._writer: Any = EventFileWriter(str(directory))
        except OSError as error:
            raise HeterpsError(f"{directory}: cannot be written ({error.strerror})") from None
        self._seen: dict[int, float] = {}
        self._metrics: set[str] = set()

    def write(self, job: Job, history: "JobHistory") -> int:
        """Write what is new; how many values that was.

        Tags: `train/loss`, `train/samples_per_s`, `utilisation/stage_N` (the share of its time
        that the stage's first worker computes), and `SPLIT/METRIC`. The step is that of training.
        """
        written = 0
        last = max((stage.stage for stage in history.stages), default=-1)
        for stage in history.stages:
            before: StagePoint | None = None
            for point in stage.points:
                if before is not None and before.attempt != point.attempt:
                    before = point if point.step else before  # over a restart there is no pace
                    continue
                if point.step > (before.step if before is not None else 0):
                    if point.at > self._seen.get(stage.stage, 0.0):
                        self._seen[stage.stage] = point.at
                        for tag, value in _values(stage.stage, last, before, point):
                            self._add(point.at, point.step, tag, value)
                            written += 1
                    before = point
        for name, value in job.metrics.items():
            if name not in self._metrics:
                self._metrics.add(name)
                split, _, metric = name.partition("_")
                at = job.ended_at or time.time()
                self._add(at, job.step, f"{split}/{metric}" if metric else name, value)
                written += 1
        self._writer.flush()
        return written

    def close(self) -> None:
        """Finish the file."""
        self._writer.close()

    def _add(self, at: float, step: int, tag: str, value: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        summary = Summary(value=[Summary.Value(tag=tag, simple_value=value)])
        self._writer.add_event(Event(wall_time=at, step=step, summary=summary))


def follow(client: "Client", job_id: str, directory: Path) -> tuple[Job, int]:
    """Write a job's events into DIRECTORY/JOB_ID until it ends; how it ended, and how many values.

    Raises:
        HeterpsError: as `EventWriter`, and from the client.
    """
    writer = EventWriter(directory / job_id)
    written = 0
    try:
        while True:
            job = client.status(job_id)  # asked first: what comes later is written in the next turn
            written += writer.write(job, client.history(job_id))
            if job.state.is_final:
                return job, written
            time.sleep(_EVERY_S)
    finally:
        writer.close()


def _values(
    stage: int, last: int, before: "StagePoint | None", point: "StagePoint"
) -> Iterator[tuple[str, float]]:
    if stage == last and point.loss:
        yield "train/loss", point.loss
        yield from ((f"train/loss_{name}", value) for name, value in point.loss_terms.items())
    start, busy, samples = (
        (before.train_seconds, before.busy_s, before.samples) if before else (0.0, 0.0, 0)
    )
    passed = point.train_seconds - start
    if passed <= 0:
        return
    if stage == last:
        yield "train/samples_per_s", (point.samples - samples) / passed
    yield f"utilisation/stage_{stage}", min(max((point.busy_s - busy) / passed, 0.0), 1.0)
