"""The values that a sweep tries of one key, as `--set KEY=log:1e-4..1e-1` gives them."""

import json
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from chassis.yaml_loader import READING_ERRORS, YamlLoader
from heterps.job.schema import field_at, is_whole
from heterps.sweep.errors import SweepError
from protos.job_pb2 import JobSpec

if TYPE_CHECKING:
    import optuna

SHORT: Final = {"lr": "train.optimizer.learning_rate"}
_RANGES: Final = ("log", "int", "float")
_CHOICE: Final = "choice"
_FORMS: Final = (
    "a value, a range such as log:1e-4..1e-1, int:1..8 or float:0..0.5, or choice:adam,sgd"
)
# By these trials would be measured otherwise than others, or kept elsewhere.
_FIXED: Final = frozenset(
    (
        *("name", "output", "code", "priority", "data.path", "data.prepare", "data.valid"),
        *("data.label", "data.labels", "data.weight"),
        *("train.validate.metric", "train.checkpoint.best"),
    )
)


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both among them.

    Attributes:
        log: drawn evenly in their logarithm.
    """

    key: str
    low: float
    high: float
    whole: bool
    log: bool

    @property
    def ends(self) -> tuple[float, ...]:
        """Values that tell whether the job takes all."""
        return (self.low, self.high)

    def suggest(self, trial: "optuna.Trial") -> float:
        """A value for a trial."""
        if self.whole:
            return trial.suggest_int(self.key, int(self.low), int(self.high), log=self.log)
        return trial.suggest_float(self.key, self.low, self.high, log=self.log)

    def read(self, kept: Any) -> Any:
        """The value that a study keeps."""
        return kept


@dataclass(frozen=True, slots=True)
class Choice:
    """Some values of any type."""

    key: str
    ends: tuple[Any, ...]

    def suggest(self, trial: "optuna.Trial") -> Any:
        """A value for a trial."""
        texts = [json.dumps(value) for value in self.ends]  # Optuna takes no lists
        return json.loads(trial.suggest_categorical(self.key, texts))

    def read(self, kept: Any) -> Any:
        """The value that a study keeps."""
        return json.loads(kept)


Parameter = Range | Choice


def parameter_of(assignment: str) -> Parameter | None:
    """Read `KEY=RANGE`; None for `KEY=VALUE`, a value that all trials have.

    Raises:
        SweepError: it is no range of the key's type, or the key is to be the same in all trials.
    """
    key, equals, text = assignment.partition("=")
    key, text = full_key(key.strip()), text.strip()
    shown = f"--set {assignment}"
    head, colon, rest = text.partition(":")
    if not equals or not colon or head not in (*_RANGES, _CHOICE):
        return None
    if key in _FIXED:
        raise SweepError(f"{shown}: expected one value for all trials, which are compared by it")
    return _choice(key, rest, shown) if head == _CHOICE else _range(key, text, shown)


def full_key(key: str) -> str:
    """The key that a short name stands for."""
    return SHORT.get(key, key)


def _choice(key: str, text: str, shown: str) -> Choice:
    try:
        values = YamlLoader(f"[{text}]").get_single_data()
    except READING_ERRORS:
        values = None
    if not isinstance(values, list) or len(values) < 2:
        raise SweepError(f"{shown}: expected several values, such as {key}=choice:16,32")
    return Choice(key, tuple(values))


def _range(key: str, text: str, shown: str) -> Range:
    *kinds, bounds = text.split(":")
    low, dots, high = bounds.partition("..")
    if not dots or len(set(kinds)) != len(kinds) or not {*kinds} <= {*_RANGES}:
        raise SweepError(f"{shown}: expected {_FORMS}")
    spec = field_at(JobSpec.DESCRIPTOR, key)
    whole = spec is not None and is_whole(spec)
    if "float" in kinds and (whole or "int" in kinds):
        raise SweepError(f"{shown}: expected int: or log:, as {key} is a whole number")
    whole = whole or "int" in kinds
    try:
        ends = [float(low), float(high)]
    except ValueError:
        raise SweepError(f"{shown}: expected two numbers, such as {kinds[0]}:1..8") from None
    if not all(map(math.isfinite, ends)) or ends[0] >= ends[1]:
        raise SweepError(f"{shown}: expected the lower number first, and both finite")
    if "log" in kinds and ends[0] <= 0:
        raise SweepError(f"{shown}: expected numbers above 0, which have a logarithm")
    if whole and not all(end.is_integer() for end in ends):
        raise SweepError(f"{shown}: expected whole numbers")
    return Range(key, ends[0], ends[1], whole, "log" in kinds)
