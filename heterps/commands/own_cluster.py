"""The cluster of its own on this machine that a command starts for a job."""

import signal
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
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
        self, console: "Console", redis_url: str | None, keep: bool = False
    ) -> "Iterator[Callable[[], Client]]":
        """A cluster of these types, ended afterwards unless it is to be kept.

        It starts while the block does something else; what is yielded waits for it and gives a
        client. One that is to be kept starts only then: until then the command may still fail.
        """
        from heterps.client.client import Client
        from heterps.cluster.embedded import Cluster
        from heterps.report.progress import step

        types, emulated = dict(self.types), list(self.emulated)
        if keep:
            from heterps.cluster import supervisor

            with ExitStack() as stack:
                kept: list[str] = []

                def up() -> Client:
                    with step(console, "starting the cluster"):
                        running = supervisor.up(types, emulated, redis_url=redis_url)
                    kept.append(running.address)
                    return stack.enter_context(Client(running.address))

                yield up
            end = "end it with `heterps down`"
            for address in kept:
                console.print(f"  the cluster stays up at {address}; {end}")
            return
        cluster = Cluster(types=types, emulate=emulated, redis_url=redis_url, devices=self.devices)
        starter = ThreadPoolExecutor(1)
        starting = starter.submit(cluster.start)

        def started() -> Client:
            with step(console, "starting the cluster"):
                return starting.result().client()

        try:
            yield started
        finally:
            with uninterrupted():
                cluster.stop()
                starter.shutdown()

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
