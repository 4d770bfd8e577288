"""Running the trials of a study as jobs of a cluster."""

import math
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from heterps.client import calls
from heterps.client.client import Client
from heterps.client.records import Job, State
from heterps.client.retry import Retry
from heterps.errors import HeterpsError, UnknownJobError, UnreachableError
from heterps.job.data import contents_of
from heterps.job.file import JobFileError
from heterps.sweep.best import BestModel
from heterps.sweep.errors import SweepError
from heterps.sweep.space import Space
from heterps.sweep.study import Asked, Study, Trial, TrialState
from protos.job_pb2 import JobSpec

_POLL_S = 0.5
_STEM: Final = 28  # letters of a job's name in the ids of its trials, which have room for the rest
# What ends a job whatever the values of its trial are, more often than not.
_OF_ALL: Final = frozenset(("user_error", "invalid_job", "infeasible_plan"))
_MOST_OF_ALL: Final = 3


@dataclass(slots=True)
class _Running:
    asked: Asked
    job_id: str
    job: JobSpec
    reported: int = 0  # the last step whose validation was told
    retry: Retry = field(default_factory=Retry)


class Sweep:
    """Trials of a study, so many at once.

    Args:
        submit: hands a job to the cluster under an id.
        on_begin: told of each trial, and its job, that was submitted or found.
        on_end: told of each that ended, and of its job where it had one that ended.
    """

    def __init__(
        self,
        client: Client,
        study: Study,
        space: Space,
        model: BestModel,
        submit: Callable[[JobSpec, str], None],
        on_begin: Callable[[Trial, str], None] = lambda trial, job_id: None,
        on_end: Callable[[Trial, str], None] = lambda trial, job_id: None,
    ) -> None:
        self._client = client
        self._study = study
        self._space = space
        self._model = model
        self._submit = submit
        self._on_begin = on_begin
        self._on_end = on_end
        self._running: list[_Running] = []
        self._failed_alike = 0

    def run(self, trials: int, parallel: int = 1) -> None:
        """Go on until so many trials have ended, of earlier runs of the sweep too.

        Raises:
            SweepError: the first trials failed of what all will fail of, or their data changed.
            UnreachableError: the cluster is away for long. Trials go on, and can be taken up.
        """
        self._model.settle(self._study.best)
        self._take_up()
        while True:
            while len(self._running) < parallel and self._left(trials) > 0:
                self._begin()
            if not self._running:
                return
            time.sleep(_POLL_S)
            self._running = [one for one in self._running if not self._look_at(one)]

    def cancel(self) -> None:
        """End the trials that run. Others will have their values when the sweep goes on."""
        for one in self._running:
            if one.asked.trial.state is not TrialState.RUNNING:
                continue
            with suppress(HeterpsError):
                self._client.cancel(one.job_id)
            self._on_end(one.asked.interrupt(), one.job_id)
        self._running = []

    def _left(self, trials: int) -> int:
        ended = sum(trial.state.counts for trial in self._study.trials)
        return trials - ended - len(self._running)

    def _take_up(self) -> None:
        """Follow the jobs of trials that ran when the sweep before died."""
        for asked in self._study.left_running():
            trial, job = asked.trial, None
            if trial.job_id:
                with suppress(UnknownJobError):
                    job = self._client.status(trial.job_id)
            if job is None or job.state is State.CANCELLED:
                self._on_end(asked.interrupt(), trial.job_id)
                continue
            spec = self._space.job(trial.values)
            reported = asked.samples // spec.train.batch_size
            self._running.append(_Running(asked, trial.job_id, spec, reported))
            self._on_begin(trial, trial.job_id)

    def _begin(self) -> None:
        asked = self._study.ask()
        trial = asked.trial
        before = self._study.same(asked)
        if before is not None and before.value is not None:
            asked.submits(before.job_id)
            reason = f"the values of trial {before.number}"
            self._on_end(asked.complete(before.value, reason), "")
            return
        try:
            job = self._space.job(trial.values)
        except JobFileError as error:
            self._on_end(asked.fail(str(error).partition("\n")[0]), "")
            return
        ended = f"-trial-{trial.number}"
        job_id = calls.new_id(f"{job.name[:_STEM]}{ended}")
        job.name = f"{job.name}{ended}"
        running = _Running(asked, job_id, job)
        self._running.append(running)  # first: whatever breaks off, it is cancelled
        asked.submits(job_id)
        self._submit(job, job_id)
        for split in ("train", "valid"):  # which are made by now
            self._study.learns_from(split, *contents_of(job, split))
        self._on_begin(asked.trial, job_id)

    def _look_at(self, one: _Running) -> bool:
        """Report what is new of a trial; whether it has ended."""
        try:
            job = self._client.status(one.job_id)
            worse = self._report(one, job)
            if worse and not job.state.is_final:
                job = self._client.cancel(one.job_id)
                if job.state not in (State.SUCCEEDED, State.FAILED):
                    self._on_end(one.asked.prune(worse), one.job_id)
                    return True
            if job.state.is_final:
                self._on_end(self._ended(one, job), one.job_id)
        except UnreachableError as error:
            one.retry.failed(error)
            return False
        except UnknownJobError as error:
            self._on_end(one.asked.fail(str(error).partition("\n")[0]), "")
            return True
        one.retry.succeeded()
        return job.state.is_final

    def _report(self, one: _Running, job: Job) -> str:
        """Tell the study what was measured; why the trial is to end, "" where it is not."""
        name, worse = self._study.aim.name, ""
        for validated in job.validated:
            value = validated.metrics.get(name)
            if validated.step <= one.reported or value is None:
                continue
            one.reported = validated.step
            # Trials with other batches are held against one another after as many samples.
            if one.asked.report(value, validated.step * one.job.train.batch_size):
                worse = f"{name} {value:.5g} after step {validated.step}: most others had better"
        return worse

    def _ended(self, one: _Running, job: Job) -> Trial:
        if job.state is State.SUCCEEDED:
            value = job.metrics.get(self._study.aim.name, math.nan)
            if not math.isfinite(value):
                return one.asked.fail(f"{self._study.aim.name} is no number")
            best = self._study.best
            score = self._study.score
            if best is None or best.value is None or score(value) > score(best.value):
                self._model.fetch(self._client, one.job_id)
            self._failed_alike = 0
            ended = one.asked.complete(value)
            self._model.settle(self._study.best)
            return ended
        if job.state is State.CANCELLED:
            by = f" by {job.cancelled_by}" if job.cancelled_by else ""
            return one.asked.fail(f"cancelled{by}")
        why = job.error or job.reason.partition("\n")[0]
        ended = one.asked.fail(f"{job.end_reason}: {why}")
        self._check_failures(job, ended, self._study.trials)
        return ended

    def _check_failures(self, job: Job, ended: Trial, trials: Iterable[Trial]) -> None:
        """Go on only where not all trials fail of the same.

        Raises:
            SweepError: they do.
        """
        self._failed_alike += job.end_reason in _OF_ALL
        if any(trial.state is TrialState.COMPLETE for trial in trials):
            return
        if self._failed_alike >= _MOST_OF_ALL:
            raise SweepError(
                f"{self._failed_alike} trials failed, and none is complete; the last, of "
                f"{job.job_id}: {ended.reason}. See `heterps logs {job.job_id}`"
            )
