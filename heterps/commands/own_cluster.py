"""The cluster of its own on this machine that a command starts for a job."""

import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import TYPE_CHECKING

import click

from heterps.commands import options
from heterps.errors import HeterpsError

if TYPE_CHECKING:
    from rich.console import Console

    from heterps.client.client import Client
    from protos.job_pb2 import JobSpec


@dataclass(frozen=True, slots=True)
class Offer:
    """What this machine has of the types that a job may use.

    Attributes:
        types: units by type.
        emulated: likewise, of those without their device.
        absent: types that are not here.
        devices: by type of the job, cpu or cuda.
    """

    types: Mapping[str, int]
    emulated: Mapping[str, int]
    absent: tuple[str, ...]
    devices: Mapping[str, str]

    @classmethod
    def of(cls, job: "JobSpec", units: int | None, emulate: tuple[str, ...]) -> "Offer":
        """Look what is here.

        Args:
            units: CPU cores to offer; None for all.
            emulate: TYPE or TYPE=N, beside those of the job.

        Raises:
            click.BadParameter: there is no such type.
            HeterpsError: none of the job's types is here.
        """
        from heterps.profiling.present import present_types

        offered = job.schedule.offered.types
        emulated = dict.fromkeys(job.schedule.emulate, 1)
        emulated |= options.types_of(emulate, "--emulate")
        names = [kind.name for kind in offered]
        for name in emulated:
            if name not in names:
                raise click.BadParameter(
                    f"{name!r}: {job.schedule.resources} has no such type; it has "
                    f"{', '.join(names)}",
                    param_hint="--emulate",
                )
        types = {**present_types(offered, emulated, units), **emulated}
        if not types:
            raise HeterpsError(
                f"{job.schedule.resources}: none of its types is on this machine: "
                f"{', '.join(names)}; expected a CPU type, or --emulate TYPE"
            )
        absent = tuple(name for name in names if name not in types)
        return cls(types, emulated, absent, {kind.name: kind.device for kind in offered})

    def emulate_in(self, job: "JobSpec") -> None:
        """Have a job be planned with the types that are emulated here."""
        del job.schedule.emulate[:]
        job.schedule.emulate.extend(self.emulated)

    @contextmanager
    def cluster(
        self,
        console: "Console",
        redis_url: str | None,
        keep: bool = False,
        meanwhile: Callable[[], object] = lambda: None,
    ) -> "Iterator[Client]":
        """A cluster of these types, ended afterwards unless it is to be kept.

        Args:
            meanwhile: done while it starts.
        """
        from heterps.client.client import Client
        from heterps.cluster.embedded import Cluster
        from heterps.report.progress import step

        types, emulated = dict(self.types), list(self.emulated)
        if keep:
            from heterps.cluster import supervisor

            meanwhile()
            with step(console, "starting the cluster"):
                running = supervisor.up(types, emulated, redis_url=redis_url)
            with Client(running.address) as client:
                yield client
            end = "end it with `heterps down`"
            console.print(f"  the cluster stays up at {running.address}; {end}")
            return
        cluster = Cluster(types=types, emulate=emulated, redis_url=redis_url, devices=self.devices)
        starting = Future[object]()

        def start() -> None:
            try:
                starting.set_result(cluster.start())
            except BaseException as error:
                starting.set_exception(error)

        thread = threading.Thread(target=start, name="starts the cluster")
        thread.start()
        try:
            meanwhile()
            with step(console, "starting the cluster"):
                starting.result()
            yield cluster.client()
        finally:
            with uninterrupted():
                while thread.is_alive():  # it fails as soon as one of its processes has ended
                    cluster.stop()
                    thread.join(0.1)
                cluster.stop()

    def tell_absent(self, console: "Console") -> None:
        """Say which types are not here."""
        if self.absent:
            console.print(
                f"not on this machine: {', '.join(self.absent)}; --emulate {self.absent[0]} plans "
                "with it",
                soft_wrap=True,
            )

    def __str__(self) -> str:
        shown = (f"{n} {t}{' (emulated)' * (t in self.emulated)}" for t, n in self.types.items())
        return ", ".join(shown)


def look_up_weights(job: "JobSpec") -> None:
    """Put the place into `train.from` that JOB[@STEP] names, a job that `train` ran before."""
    from heterps.client import archive
    from heterps.client.calls import match
    from heterps.client.origins import weights_of
    from heterps.job.checkpoints import Named, is_place

    text = job.train.warm_start
    named = Named.of(text) if text and not is_place(text) else None
    if named is not None:
        jobs = {one.job_id: one for one in archive.jobs()}
        found = jobs[match(named.job, list(jobs))]
        job.train.warm_start = weights_of(found, named.step)


def keep_record(client: "Client", job_id: str) -> None:
    """Keep the job's record, so that `inspect` and `logs` know it when the cluster is gone."""
    from heterps.client import archive
    from heterps.errors import NoDecisionError

    with suppress(HeterpsError, OSError):
        try:
            decision = client.decision_message(job_id)
        except NoDecisionError:
            decision = None
        plans = client.history(job_id).plans
        archive.add(client.status_message(job_id), decision, client.logs(job_id), plans)


def interrupt(number: int, frame: FrameType | None) -> None:
    """End as Ctrl-C does: a handler of signals."""
    raise KeyboardInterrupt


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Let nothing cut the ending short: it is bounded in time."""
    before = {s: signal.signal(s, signal.SIG_IGN) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
