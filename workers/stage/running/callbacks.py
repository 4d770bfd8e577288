"""Code of a job that is called in the course of its training, by the leader of the last stage.

There the loss is known. Each step is told of at least once and in order: where a training goes on,
after a worker was replaced or from a cut, the last steps before are told of again, as many as
whoever led before may have left untold. What is called may end the training, and look at the
stage's module. It may not change it: every worker of the stage has a copy of its own.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from torch import Tensor, nn

from chassis.near import did_you_mean
from protos.job_pb2 import JobSpec
from workers.errors import CallbackError
from workers.learning.optimizers import rate_factor
from workers.model.checks.numbers import Numbers
from workers.model.code.entry import ModelError, integral, load_entry
from workers.model.objective.loss import job_loss
from workers.stage.report.progress import Progress
from workers.stage.steps.schedule import Schedule
from workers.stage.steps.stop import Stop
from workers.stage.update.ending import Ending
from workers.stage.update.versions import Versions

BEGIN, STEP, EVAL, END = HOOKS = ("on_begin", "on_step", "on_eval", "on_end")
_log = logging.getLogger("heterps.stage")


@dataclass(slots=True)
class TrainingState:
    """What a callback sees of a training.

    Attributes:
        job_id: of the job.
        name: that the job file gives it.
        step: how many steps are over.
        steps: of the training.
        samples: trained until then, over all workers.
        loss: of the last of these steps; NaN before the first.
        losses: its terms by their names, of a loss with but one {"loss": …}.
        learning_rate: of dense weights in that step.
        seconds: of training, all attempts together.
        error: in `on_end`, why the training ends here before it is done; else empty.
    """

    job_id: str
    name: str
    step: int
    steps: int
    samples: int
    loss: float
    losses: Mapping[str, float]
    learning_rate: float
    seconds: float
    error: str
    _look: Callable[[], nn.Module] = field(repr=False)
    _stop: Callable[[int], None] = field(repr=False)

    @property
    def module(self) -> nn.Module:
        """The last stage's layers under their names in the model; to be looked at alone."""
        return self._look()

    def stop(self) -> None:
        """End the training after this step, and `train.staleness` more, on all workers."""
        self._stop(self.step)


def job_callbacks(job: JobSpec) -> dict[str, Any]:
    """A job's callbacks by their entries.

    Raises:
        ModelError: one is not there, cannot be made, or has nothing that would be called.
    """
    return {entry: _made(job, entry) for entry in job.model.callbacks}


def _made(job: JobSpec, entry: str) -> Any:
    make = load_entry(entry, Path(job.directory), "model.callbacks")
    given = job.model.callback_args[entry.rpartition(":")[2]]
    arguments = {name: integral(value) for name, value in MessageToDict(given).items()}
    try:
        made = make(**arguments)
    except Exception as error:
        raise ModelError(
            f"model.callbacks: {entry} with {arguments} failed: {type(error).__name__}: {error}"
        ) from error
    named = [name for name in dir(made) if name.startswith("on_")]
    unknown = [name for name in named if name not in HOOKS]
    if unknown or not named:
        got = f"{unknown[0]!r} is never called" if unknown else "it has nothing that is called"
        hint = did_you_mean(unknown[0], HOOKS) if unknown else ""
        raise ModelError(f"model.callbacks: {entry}: {got}; expected {', '.join(HOOKS)}{hint}")
    return made


class Callbacks:
    """Those of a job, at the one worker that calls them.

    Args:
        callbacks: by their entries.
        module: the stage's.
    """

    def __init__(
        self,
        job: JobSpec,
        job_id: str,
        callbacks: Mapping[str, Any],
        module: nn.Module,
        versions: Versions,
        schedule: Schedule,
        staleness: int,
        ending: Ending,
        progress: Progress,
        stop: Stop,
    ) -> None:
        self._job = job
        self._job_id = job_id
        self._all = callbacks
        self._module = module
        self._versions = versions
        self._schedule = schedule
        self._staleness = staleness
        self._ending = ending
        self._progress = progress
        self._stop = stop
        # Code that steps are computed by, of the job's own.
        self._computing = [job_loss(job).function, *{type(one) for one in module.modules()}]
        self._looked = False  # whether any has the module
        self._seen: _Seen | None = None  # the module before the callback that runs
        self._begun = False

    def begin(self) -> None:
        """Training begins or goes on, after the steps so far.

        Raises:
            CallbackError: one failed.
        """
        self._begun = True
        self._call(BEGIN)
        over = self._progress.step
        for step in range(max(1, over - self._staleness), over + 1):
            self._call(STEP, step)

    def stepped(self) -> None:
        """A step is over; raises as `begin`."""
        self._call(STEP)

    def measured(self, metrics: Mapping[str, float]) -> None:
        """Held-out data was measured; raises as `begin`."""
        if metrics:
            self._call(EVAL, None, dict(metrics))

    def end(self, error: str = "") -> None:
        """Training is over here; without effect where it never began, or has ended.

        Args:
            error: why it ends before it is done. What callbacks raise then is told, no more.

        Raises:
            CallbackError: one failed, of a training that is done.
        """
        if not self._begun:
            return
        self._begun = False
        try:
            self._call(END, error=error)
        except CallbackError as failed:
            if not error:
                raise
            _log.warning("%s", failed)

    def _call(self, hook: str, step: int | None = None, *more: Any, error: str = "") -> None:
        for name, callback in self._all.items():
            function = getattr(callback, hook, None)
            if function is None:
                continue
            state = self._state(step, error)
            where = f"{name}: {hook} after step {state.step}"
            self._seen = self._look_at() if self._looked else None
            numbers = Numbers(*self._computing)
            try:
                function(state, *more)
            except (Exception, SystemExit) as failed:
                raise CallbackError(f"{where}: {type(failed).__name__}: {failed}") from failed
            for number in numbers.changed():
                raise CallbackError(
                    f"{where} changed {number.name!r}, which the loss or a layer reads: other "
                    "workers have the old one, and so have jobs that go on from a checkpoint; "
                    "expected what follows from the step in a buffer that a forward counts"
                )
            if self._seen is not None and (changed := self._seen.changed()):
                raise CallbackError(
                    f"{where} changed {changed!r}; expected what only looks at parameters, "
                    "buffers, gradients and settings: every worker of the stage has its own"
                )

    def _state(self, step: int | None, error: str) -> TrainingState:
        progress, schedule, spec = self._progress, self._schedule, self._job.train.optimizer
        over = progress.step
        step = over if step is None else step
        curve, last = progress.curve, step - 1
        loss = curve.losses[last] if step else float("nan")
        terms = {name: values[last] if step else loss for name, values in curve.terms.items()}
        taken = max(0, self._ending.applied - (over - step) - 1)
        return TrainingState(
            self._job_id,
            self._job.name,
            step,
            schedule.steps,
            progress.samples - sum(schedule.samples(later) for later in range(step, over)),
            loss,
            terms or {"loss": loss},
            spec.learning_rate * rate_factor(spec, taken, schedule.steps),
            progress.before_s + progress.train_seconds,
            error,
            self._look,
            self._stop.ask,
        )

    def _look(self) -> nn.Module:
        """The module as it is after the steps so far; from here on it is watched."""
        self._looked = True
        self._seen = self._seen or self._look_at()
        self._seen.copy()
        return self._module

    def _look_at(self) -> "_Seen":
        self._versions.use_newest(self._progress.step)
        return _Seen(self._module)


class _Seen:
    """A module as it was, to be held against what it is."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._before = _facts(module)
        self._settings = _settings(module)
        self._modes = {child: child.training for child in module.modules()}
        self._copies: dict[str, Tensor] = {}

    def copy(self) -> None:
        """Keep the values too: `tensor.data` is changed without a trace."""
        self._copies = self._copies or {
            n: t.detach().clone() for n, t in _tensors(self._module).items()
        }

    def changed(self) -> str:
        """The name of what is another now; empty for nothing. Modes are set back."""
        for child, training in self._modes.items():
            child.training = training
        now = _facts(self._module)
        for name in [*self._before, *now]:
            if self._before.get(name) != now.get(name):
                return name
        settings = _settings(self._module)
        for name, value in self._settings.items():
            if name in settings and settings[name] is not value and settings[name] != value:
                return name
        tensors = _tensors(self._module)
        return next((n for n, copy in self._copies.items() if not _equal(tensors[n], copy)), "")


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _settings(module: nn.Module) -> dict[str, object]:
    """Numbers and text that modules have as attributes, such as a temperature."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, child in module.named_modules()
        for name, value in vars(child).items()
        if name != "training" and isinstance(value, bool | int | float | str)
    }


def _facts(module: nn.Module) -> dict[str, tuple[object, ...]]:
    """What shows nearly every change without a copy: tensors count changes in place."""
    return {
        name: (
            id(t),
            t._version,
            t.requires_grad,
            id(t.grad),
            t.grad is not None and t.grad._version,
        )
        for name, t in _tensors(module).items()
    }


def _equal(one: Tensor, other: Tensor) -> bool:
    """Whether all values are the same; NaN is NaN."""
    same = one == other
    return bool((same | (one != one) & (other != other)).all())  # noqa: PLR0124
