"""How long interruptions took, by type: measured by all jobs, for the plans of those to come."""

import logging
from collections.abc import Callable, Iterable, Mapping

from protos.decision_pb2 import Resources
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import JobStatus, Recovery, RecoveryTimes
from scheduler.problem.wording import time_text
from scheduler.state.store import Store, StoreError

_WEIGHT = 20  # of the latest: a mean of about so many
_log = logging.getLogger("heterps.runner")


def measured(recovery: Recovery, before: RecoveryTimes) -> RecoveryTimes:
    """The times of a type with those of workers that were replaced while others went on.

    What had been done of the open step counts, as it is done again.
    Where all went back to a cut it was as if another attempt had begun.
    """
    after = RecoveryTimes()
    after.CopyFrom(before)
    if recovery.back:
        seconds = recovery.seconds + recovery.lost_s
        after.restarted += 1
        after.restarted_s += (seconds - before.restarted_s) / min(after.restarted, _WEIGHT)
        return after
    seconds = max(recovery.seconds, recovery.stood_s)
    after.replaced += 1
    after.replaced_s += (seconds - before.replaced_s) / min(after.replaced, _WEIGHT)
    return after


def began_again(status: JobStatus, before: RecoveryTimes) -> RecoveryTimes:
    """The times of a type with those of an attempt that trains where another one was lost.

    Until it trained, and as long as the attempt before it took for the steps since the cut.
    """
    after = RecoveryTimes()
    after.CopyFrom(before)
    last = status.attempts[-1]
    took_s = max(0.0, last.ended_at - last.started_at) if last.started_at else 0.0
    steps = last.step - last.from_step
    lost = last.step - max(status.from_step, last.from_step)
    seconds = max(0.0, status.started_at - last.ended_at)
    seconds += took_s * max(0, lost) / steps if steps > 0 else 0.0
    after.restarted += 1
    after.restarted_s += (seconds - before.restarted_s) / min(after.restarted, _WEIGHT)
    return after


def reached_at(status: JobStatus, step: int) -> float:
    """When a job came to a step that it goes back to, in seconds since the epoch."""
    times = [status.started_at]
    times += [cut.taken_at - cut.seconds for cut in status.cuts if cut.step == step]
    times += [one.at + one.seconds for one in status.recoveries if one.back]
    return max(times)


def note_recovery(store: Store, job_id: str, recovery: Recovery, kinds: Iterable[str]) -> None:
    """Keep how long it took; not where Redis is away.

    Args:
        kinds: types of the units that were lost.
    """
    _note(store, job_id, kinds, lambda before: measured(recovery, before))


def note_beginning(store: Store, status: JobStatus, kinds: Iterable[str]) -> None:
    """Keep how long it took until an attempt trains where another one was lost, if one was.

    Args:
        kinds: types of its units.
    """
    if status.attempts and not status.attempts[-1].drained:
        _note(store, status.job_id, kinds, lambda before: began_again(status, before))


def _note(
    store: Store,
    job_id: str,
    kinds: Iterable[str],
    edit: Callable[[RecoveryTimes], RecoveryTimes],
) -> None:
    try:
        times = store.recovery_times()
        for kind in sorted(kinds):
            store.put_recovery_times(kind, edit(times.get(kind, RecoveryTimes())))
    except StoreError as error:
        _log.warning("job %s: %s; how long it took is not kept", job_id, error)


def with_times(
    offered: Resources, times: Mapping[str, RecoveryTimes], job: JobSpec
) -> tuple[Resources, list[str]]:
    """Resources with what interruptions are known to take, and a sentence for each such type.

    A type that is never taken away stays as it is, as does what was not measured. Where nothing
    tells how long the only unit of a stage takes, half of the time between two cuts is lost with
    it.
    """
    found, said = Resources(), []
    found.CopyFrom(offered)
    for kind in found.types:
        if not kind.interruptions_per_hour:
            continue
        seen = times.get(kind.name, RecoveryTimes())
        replaced = f"{time_text(kind.recovery_s)} (the resources file)"
        if seen.replaced:
            kind.recovery_s = seen.replaced_s
            replaced = f"{time_text(kind.recovery_s)} (measured, {_times(seen.replaced)})"
        restarted = f"{time_text(max(kind.restart_s, kind.recovery_s))} (the resources file)"
        if seen.restarted:
            kind.restart_s = seen.restarted_s
            restarted = f"{time_text(kind.restart_s)} (measured, {_times(seen.restarted)})"
        elif not kind.restart_s and (every_s := seconds_between_cuts(job)):
            kind.restart_s = kind.recovery_s + every_s / 2
            restarted = f"{time_text(kind.restart_s)} (half of the time between checkpoints in it)"
        said.append(
            f"An interruption of a unit of {kind.name} counts {replaced}, and {restarted} where "
            "it is the only one of its stage."
        )
        if not job.train.checkpoint.every:
            said.append(
                "The job takes no checkpoints, so where the only worker of a stage is taken away "
                "all is lost, which no price here counts."
            )
    return found, list(dict.fromkeys(said))


def seconds_between_cuts(job: JobSpec) -> float:
    """Of a job that takes them by the clock; 0 where it does not."""
    # Brings NumPy: only where units may be taken away.
    from scheduler.problem.demands import hours_of
    from scheduler.problem.fields import InputError

    every = job.train.checkpoint.every
    try:
        return hours_of("train.checkpoint.every", every) * 3600 if every else 0.0
    except InputError:  # so many steps
        return 0.0


def _times(count: int) -> str:
    return "once" if count == 1 else f"{count} times"
