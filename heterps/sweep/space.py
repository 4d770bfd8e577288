"""The jobs that a sweep may try: one job file, with values for some of its keys."""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from chassis.aim import Aim
from chassis.files import replace_file
from chassis.interval import Interval
from heterps.job import yaml_nodes
from heterps.job.checkpoints import wrong_metric
from heterps.job.file import load_job
from heterps.job.learning import metric_names
from heterps.sweep.errors import SweepError
from heterps.sweep.parameters import Parameter, Range, full_key, parameter_of
from protos.job_pb2 import JobSpec
from protos.losses import of_whole_batches

if TYPE_CHECKING:
    import optuna

Values = Mapping[str, Any]
_BATCH = "train.batch_size"
_HEAD = "# Made by `heterps sweep`"


class Space:
    """A job file and what is tried of it.

    Args:
        assignments: `KEY=RANGE` and `KEY=VALUE` texts, as of --set.

    Attributes:
        parameters: the ranges by their keys.
        base: the job with the first value of each.

    Raises:
        SweepError: no range is among them, a key has several, two values make one job, or trials
            would be measured otherwise than others.
        JobFileError: the job does not take a value at the end of a range; names key and value.
    """

    def __init__(self, file: Path, assignments: Iterable[str]) -> None:
        self.file = file
        self.parameters: dict[str, Parameter] = {}
        self._fixed: list[str] = []
        for assignment in assignments:
            parameter = parameter_of(assignment)
            if parameter is None:
                key, equals, value = assignment.partition("=")
                self._fixed.append(f"{full_key(key.strip())}{equals}{value}")
            elif parameter.key in self.parameters:
                raise SweepError(f"--set {assignment}: expected one range of {parameter.key}")
            else:
                self.parameters[parameter.key] = parameter
        if not self.parameters:
            raise SweepError("--set: expected a range to try, such as lr=log:1e-4..1e-1")
        first = {key: one.ends[0] for key, one in self.parameters.items()}
        self.base = self.job(first)
        if _BATCH in self.parameters and of_whole_batches(self.base):
            raise SweepError(
                f"--set {_BATCH}: expected one value for all trials, since what is measured of a "
                "loss that holds the samples of a batch against one another depends on it"
            )
        for key, one in self.parameters.items():
            jobs = [self.job({**first, key: end}) for end in one.ends]
            for place, end in enumerate(one.ends):
                if jobs[place] in jobs[:place]:
                    raise SweepError(f"--set {key}: {end!r} makes the job of another of its values")

    def suggest(self, trial: "optuna.Trial") -> dict[str, Any]:
        """Values for a trial, by key."""
        return {key: parameter.suggest(trial) for key, parameter in self.parameters.items()}

    def read(self, kept: Values) -> dict[str, Any]:
        """The values that a study keeps of a trial, by key."""
        return {key: self.parameters[key].read(value) for key, value in kept.items()}

    def job(self, values: Values) -> JobSpec:
        """The job with these values, checked.

        Raises:
            JobFileError: it cannot be.
        """
        return load_job(self.file, self._assignments(values))

    def aim(self, metric: str | None) -> Aim:
        """What trials are compared by.

        Args:
            metric: of a job without `train.validate`.

        Raises:
            SweepError: there is none, or it is not measured.
        """
        own = self.base.train.validate.metric
        if own and metric:
            raise SweepError(f"--metric {metric}: expected none beside train.validate.metric {own}")
        names = metric_names(self.base)
        text = own or metric or ""
        if not text:
            raise SweepError(
                f"{self.file}: train.validate: missing; expected it, or --metric with one of "
                f"{', '.join(names)}"
            )
        for wrong in wrong_metric(self.base, "--metric", text, names):
            raise SweepError(f"{wrong.key}: got {wrong.got}, expected {wrong.expected}")
        return Aim.of(text)

    @property
    def can_prune(self) -> bool:
        """Whether trials are measured at steps that are the same for all."""
        every = self.base.train.validate.every
        return bool(every) and bool(Interval.of(every).steps)

    def write(self, path: Path, values: Values, about: str) -> None:
        """Write the job with these values as a job file, beside the one that it came of.

        Args:
            about: where the values are from, on one line.

        Raises:
            SweepError: another file is there, or it cannot be written.
        """
        check_free(path)
        root = yaml_nodes.read(self.file, str(self.file))
        for assignment in self._assignments(values):
            yaml_nodes.override(root, assignment)
        content = yaml.safe_dump(yaml_nodes.plain(root), sort_keys=False, allow_unicode=True)
        try:
            replace_file(path, f"{_HEAD}: {about}\n{content}")
        except OSError as error:
            raise SweepError(f"{path}: cannot be written ({error.strerror})") from None
        if load_job(path) != self.job(values):
            raise SweepError(f"{path}: it does not read as the job of the best trial")

    def to_json(self) -> dict[str, Any]:
        """The ranges, as a study keeps them."""
        return {
            key: [one.low, one.high, one.whole, one.log] if isinstance(one, Range) else [*one.ends]
            for key, one in self.parameters.items()
        }

    def _assignments(self, values: Values) -> list[str]:
        own = [f"{key}={json.dumps(value)}" for key, value in values.items()]
        return [*self._fixed, *own]


def check_free(path: Path) -> None:
    """Check that a job file may be written there.

    Raises:
        SweepError: another file is there.
    """
    try:
        if path.exists() and not path.read_text(errors="replace").startswith(_HEAD):
            raise SweepError(f"{path}: expected no file there, or one of an earlier sweep")
    except OSError as error:
        raise SweepError(f"{path}: cannot be read ({error.strerror})") from None
