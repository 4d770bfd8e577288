"""What a sweep has tried, in an Optuna study that outlives it."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Any

from google.protobuf.json_format import MessageToDict, ParseDict, ParseError

from chassis.aim import Aim
from heterps.job.resume import running
from heterps.sweep.errors import SweepError
from heterps.sweep.space import Space
from protos.job_pb2 import JobSpec
from protos.training import differences

if TYPE_CHECKING:
    import optuna

_ABOUT = "heterps"
_JOB, _REASON, _INTERRUPTED = "job_id", "reason", "interrupted"


class TrialState(StrEnum):
    """Where a trial stands."""

    WAITING = "waiting"  # has the values of one that was interrupted
    RUNNING = "running"
    COMPLETE = "complete"
    PRUNED = "pruned"
    FAILED = "failed"
    INTERRUPTED = "interrupted"  # with the sweep; another trial has its values

    @property
    def counts(self) -> bool:
        """Whether it is one of those that were asked for."""
        return self in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED)


@dataclass(frozen=True, slots=True)
class Trial:
    """A training with values of its own.

    Attributes:
        values: by key.
        value: the metric of its model; None unless it is complete.
        job_id: "" before it was submitted.
        reason: why it did not complete.
    """

    number: int
    state: TrialState
    values: Mapping[str, Any]
    value: float | None
    job_id: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The same for programs."""
        return {**asdict(self), "state": str(self.state), "values": dict(self.values)}


class Study:
    """An Optuna study in a file, of one sweep at a time.

    Args:
        file: a SQLite database; made where it is not there.
        pruned: whether trials that are worse than most others at the same step are to end.

    Raises:
        SweepError: Optuna is not installed, or the file is of another sweep.
    """

    def __init__(self, file: Path, space: Space, aim: Aim, *, pruned: bool) -> None:
        self.file = file
        self.aim = aim
        self._space = space
        self._optuna = _optuna()
        self._study = self._open(pruned)

    @property
    def trials(self) -> list[Trial]:
        """All, by number."""
        return [self._trial(one) for one in self._study.get_trials(deepcopy=False)]

    @property
    def best(self) -> Trial | None:
        """The first of those with the best value."""
        best, found = None, None
        for trial in self.trials:
            score = None if trial.value is None else self.score(trial.value)
            if score is not None and (best is None or score > best):
                best, found = score, trial
        return found

    def score(self, value: float) -> float:
        """The value, turned so that more is better."""
        return value if self.aim.greater else -value

    def ask(self) -> "Asked":
        """Begin a trial, of the values of one that was interrupted, or of others."""
        trials = self._study.get_trials(deepcopy=False)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", self._optuna.exceptions.ExperimentalWarning)
            # Another one each time: a sweep that goes on would draw again what it drew first.
            self._study.sampler = self._optuna.samplers.TPESampler(
                seed=self._space.base.train.seed % (1 << 31) + len(trials), constant_liar=True
            )
        trial = self._study.ask()
        self._space.suggest(trial)
        return Asked(self, trial)

    def left_running(self) -> "list[Asked]":
        """Trials that ran when the sweep before died."""
        states = (self._optuna.trial.TrialState.RUNNING,)
        found = self._study.get_trials(deepcopy=False, states=states)
        return [Asked(self, self._optuna.trial.Trial(self._study, t._trial_id)) for t in found]

    def learns_from(self, split: str, named: str, contents: str) -> None:
        """Take in what data a trial learns from, or is measured by.

        Args:
            named: tells which files it is in.
            contents: differs where these hold other data; empty: nobody knows.

        Raises:
            SweepError: it is other data than that of trials before in the same files.
        """
        key = f"{split}.{named}"
        kept = self._study.user_attrs.get(key)
        if kept is None:
            self._study.set_user_attr(key, contents)
        elif contents != kept:
            raise SweepError(
                f"data.{split}: {getattr(self._space.base.data, split)}: it has changed since the "
                "first trial, whose values say nothing of others then; name another file with "
                "--study"
            )

    def same(self, asked: "Asked") -> Trial | None:
        """A trial that is complete and had the same values."""
        own = asked.trial.values
        done = (t for t in self.trials if t.state is TrialState.COMPLETE)
        return next((trial for trial in done if trial.values == own), None)

    def _end(self, asked: "Asked", state: TrialState, value: float | None, reason: str) -> Trial:
        if reason:
            asked.handle.set_user_attr(_REASON, reason)
        states = self._optuna.trial.TrialState
        kind = {TrialState.COMPLETE: states.COMPLETE, TrialState.PRUNED: states.PRUNED}
        return self._trial(self._study.tell(asked.handle, value, kind.get(state, states.FAIL)))

    def _again(self, asked: "Asked") -> Trial:
        asked.handle.set_user_attr(_INTERRUPTED, True)
        ended = self._end(asked, TrialState.FAILED, None, "the sweep ended")
        params = asked.handle.params
        if len(params) == len(self._space.parameters):
            self._study.enqueue_trial(params)
        return ended

    def _trial(self, frozen: "optuna.trial.FrozenTrial") -> Trial:
        facts = frozen.user_attrs
        state = {
            "FAIL": TrialState.INTERRUPTED if _INTERRUPTED in facts else TrialState.FAILED,
            "RUNNING": TrialState.RUNNING,
            "COMPLETE": TrialState.COMPLETE,
            "PRUNED": TrialState.PRUNED,
            "WAITING": TrialState.WAITING,
        }[frozen.state.name]
        value = frozen.value if state is TrialState.COMPLETE else None
        values = self._space.read(frozen.params)
        reason = str(facts.get(_REASON, ""))
        return Trial(frozen.number, state, values, value, str(facts.get(_JOB, "")), reason)

    def _open(self, pruned: bool) -> "optuna.Study":
        library, file = self._optuna, self.file
        library.logging.set_verbosity(library.logging.WARNING)
        pruners = library.pruners
        about = {
            "job": MessageToDict(self._space.base),
            "space": self._space.to_json(),
            "metric": self.aim.name,
        }
        try:
            study: optuna.Study = library.create_study(
                storage=storage_in(file),
                study_name=self._space.base.name,
                direction="maximize" if self.aim.greater else "minimize",
                pruner=pruners.MedianPruner() if pruned else pruners.NopPruner(),
                load_if_exists=True,
            )
        except Exception as error:  # SQLAlchemy's, of many kinds
            first = str(error).partition("\n")[0]
            raise SweepError(f"{file}: expected a study of a sweep, or no file: {first}") from None
        kept = study.user_attrs.get(_ABOUT)
        if kept is None and not study.get_trials(deepcopy=False):
            study.set_user_attr(_ABOUT, about)
        else:
            self._check(kept or {}, about, study)
        return study

    def _check(self, kept: Mapping[str, Any], about: Mapping[str, Any], study: Any) -> None:
        """Refuse a study of another sweep: its values tell nothing of this one's.

        Raises:
            SweepError: names what differs.
        """
        another = f"{self.file}: it is of another sweep; name another file with --study"
        try:
            before = ParseDict(kept["job"], JobSpec(), ignore_unknown_fields=True)
            space, metric = kept["space"], kept["metric"]
        except (KeyError, TypeError, ParseError):
            raise SweepError(another) from None
        for key in dict.fromkeys([*space, *about["space"]]):
            if space.get(key) != about["space"].get(key):
                was, now = space.get(key, "one value"), about["space"].get(key, "one value")
                raise SweepError(f"{another}: {key}: got {now}, where it had {was}")
        greater = study.direction.name == "MAXIMIZE"
        if (metric, greater) != (self.aim.name, self.aim.greater):
            way = "max" if greater else "min"
            raise SweepError(f"{another}: it compares by {way}:{metric}")
        for key, got, expected in differences(self._space.base, before):
            raise SweepError(f"{another}: {key}: got {got}, where it had {expected}")
        if self._space.base.entry_digest != before.entry_digest:
            entry = self._space.base.model.entry
            raise SweepError(f"{another}: model.entry: {entry} has changed since")


@dataclass(frozen=True, slots=True)
class Asked:
    """A trial that runs."""

    study: Study
    handle: "optuna.Trial"

    @property
    def trial(self) -> Trial:
        """How it stands."""
        return self.study.trials[self.handle.number]

    @property
    def samples(self) -> int:
        """After which the last report was."""
        frozen = self.study._study.get_trials(deepcopy=False)[self.handle.number]
        return frozen.last_step or 0

    def submits(self, job_id: str) -> None:
        """Keep the id of its job, before it is submitted."""
        self.handle.set_user_attr(_JOB, job_id)

    def report(self, value: float, samples: int) -> bool:
        """Tell what was measured after so many samples; whether most others were better."""
        self.handle.report(value, samples)
        return self.handle.should_prune()

    def complete(self, value: float, reason: str = "") -> Trial:
        """It has a value."""
        return self.study._end(self, TrialState.COMPLETE, value, reason)

    def prune(self, reason: str) -> Trial:
        """It was ended, as others were better."""
        return self.study._end(self, TrialState.PRUNED, None, reason)

    def fail(self, reason: str) -> Trial:
        """It has no value."""
        return self.study._end(self, TrialState.FAILED, None, reason)

    def interrupt(self) -> Trial:
        """It ends with the sweep: another trial is to have its values."""
        return self.study._again(self)


@contextmanager
def of_one_process(file: Path) -> Iterator[None]:
    """Hold a study for as long as this process lives.

    Raises:
        ResumeError: another sweep does.
    """
    with running(file.parent, file.name):
        yield


def storage_in(file: Path) -> "optuna.storages.BaseStorage":
    """Optuna's storage in a file."""
    from optuna.storages import RDBStorage

    return RDBStorage(f"sqlite:///{file.absolute()}")


def _optuna() -> Any:
    try:
        import optuna
    except ImportError:
        raise SweepError(
            "sweeps need the package optuna; type `pip install 'heterps[sweep]'`"
        ) from None
    return optuna
