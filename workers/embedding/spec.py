"""What an embedding says of its table, and what a job says in its place."""

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from google.protobuf.message import Message

from protos.job_pb2 import SegmentOptions, TableOptions
from ps.errors import TableError
from ps.table.checks import check_wire
from ps.table.rules import OPTIMIZERS, Admission, Eviction, Score, Segment
from ps.table.spec import make_spec

# What belongs to an optimizer, so that another one does not take it over.
_OF_OPTIMIZER: Final = (
    *("initial_accumulator", "momentum", "betas", "eps", "amsgrad", "l1", "l2", "beta"),
    "trust_ratio",
)
_OF_SEGMENTS: Final = (
    *("optimizer", "learning_rate", "weight_decay", "initializer", "scale", "seed"),
    *("clip_norm", "bound", *_OF_OPTIMIZER),
)
_OF_A_SEGMENT: Final = ["dim", "optimizer", "learning_rate", "initializer", "scale", "seed", "lazy"]
_NAMES: Final = {"eps": "epsilon"}  # what `create_table` calls them


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """What a table needs to know: the same fields that `create_table` takes.

    Attributes:
        clicks: the label that says which samples were clicked, for the score; None: the only one
            of 0 or 1.
        wire: how rows and gradients travel; None: as those of other tables.
    """

    table: str
    dim: int
    optimizer: str = "adagrad"
    learning_rate: float = 0.05
    weight_decay: float = 0.0
    initial_accumulator: float | None = None
    initializer: str = "uniform"
    scale: float = 0.01
    seed: int = 0
    momentum: float | None = None
    betas: tuple[float, float] | None = None
    eps: float | None = None
    amsgrad: bool | None = None
    l1: float | None = None
    l2: float | None = None
    beta: float | None = None
    clip_norm: float | None = None
    bound: float | None = None
    trust_ratio: bool | None = None
    segments: tuple[Segment, ...] = ()
    dtype: str = "float32"
    stochastic_rounding: bool = False
    admission: Admission | None = None
    eviction: Eviction | None = None
    score: Score | None = None
    clicks: str | None = None
    wire: str | None = None
    memory_bytes: int | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        if self.betas is not None:
            object.__setattr__(self, "betas", tuple(self.betas))
        if self.segments:
            self._check_segments()
        elif self.initial_accumulator is None and self.optimizer == "adagrad":
            object.__setattr__(self, "initial_accumulator", 0.1)
        if self.betas is not None and len(self.betas) != 2:
            raise TableError(f"table {self.table!r}: betas={self.betas}; expected two")
        self._check_admission()
        self._check_eviction()
        if self.clicks is not None and self.score is None:
            raise TableError(
                f"table {self.table!r}: clicks={self.clicks!r} without a score, which counts them"
            )
        if self.wire is not None:
            check_wire(self.table, self.wire)
        if self.stochastic_rounding and self.dtype == "float32":
            raise TableError(
                f"table {self.table!r}: stochastic_rounding=True with dtype='float32', which "
                "rounds nothing; expected it with float16, bfloat16 or int8"
            )
        make_spec(self.table, **self.table_options())

    def table_options(self) -> dict[str, Any]:
        """Keyword arguments of `make_spec`, the name aside."""
        options = {field.name: getattr(self, field.name) for field in fields(self)}
        for name in ("table", "clicks", "wire"):
            del options[name]
        if self.segments:
            for name in _OF_SEGMENTS:
                del options[name]
        elif (betas := options.pop("betas")) is not None:
            options["beta1"], options["beta2"] = betas
        return {_NAMES.get(key, key): value for key, value in options.items() if value is not None}

    def changed(self, options: Mapping[str, Any]) -> "EmbeddingSpec":
        """With some fields as given; another optimizer takes over no settings of the old one.

        Nor do segments, which have an optimizer each.

        Raises:
            TableError: naming the argument, its value and what was expected.
        """
        dropped: dict[str, Any] = {}
        if options.get("segments"):
            dropped = {f.name: f.default for f in fields(self) if f.name in _OF_SEGMENTS}
        elif options.get("optimizer", self.optimizer) != self.optimizer:
            dropped = dict.fromkeys(_OF_OPTIMIZER)
        return replace(self, **{**dropped, **options})

    def _check_segments(self) -> None:
        for field in fields(self):
            if field.name in _OF_SEGMENTS and getattr(self, field.name) != field.default:
                raise TableError(
                    f"table {self.table!r}: {field.name}={getattr(self, field.name)!r} beside "
                    "segments; expected it in each of them"
                )

    def _check_admission(self) -> None:
        rule = self.admission
        if rule is None or rule.kind == "bloom":
            return
        for field in fields(rule):
            value = getattr(rule, field.name)
            if field.name in ("capacity", "false_positive") and value != field.default:
                raise TableError(
                    f"table {self.table!r}: admission by {rule.kind} with {field.name}={value}; "
                    "it is a setting of bloom"
                )

    def _check_eviction(self) -> None:
        rules = self.eviction
        if rules is None:
            return
        if rules.ttl_s:
            raise TableError(
                f"table {self.table!r}: eviction by ttl_s={rules.ttl_s}, which a training does not "
                "do: how long it takes, and pauses, is not its own to say; expected ttl_steps"
            )
        for name in ("ttl_steps", "min_score", "min_norm"):
            by_size = name == "min_norm" and rules.max_rows
            if (value := getattr(rules, name)) and not rules.every_steps and not by_size:
                raise TableError(
                    f"table {self.table!r}: eviction by {name}={value} without every_steps; "
                    "expected after how many steps each it is applied"
                )
        by_steps = rules.ttl_steps or rules.min_score or rules.min_norm
        if not (rules.max_rows or by_steps or (rules.every_steps and self.score)):
            raise TableError(
                f"table {self.table!r}: eviction without a rule; expected max_rows, the most rows "
                "that a shard holds, or ttl_steps, min_score or min_norm, and every_steps"
            )


def options_of(message: TableOptions) -> dict[str, Any]:
    """Fields of `EmbeddingSpec` that a job gives.

    Raises:
        TableError: an admission or a segment that lacks what it needs.
    """
    given = _given(message)
    if message.HasField("admission"):
        inner = _given(message.admission)
        if lacking := [name for name in ("kind", "threshold") if name not in inner]:
            raise TableError(f"admission: {', '.join(lacking)} missing")
        given["admission"] = Admission(**inner)
    if message.HasField("eviction"):
        given["eviction"] = Eviction(**_given(message.eviction))
    if message.HasField("score"):
        given["score"] = Score(**_given(message.score))
    if message.segments:
        given["segments"] = tuple(map(_segment, message.segments))
    return given


def _segment(message: SegmentOptions) -> Segment:
    given = _given(message)
    if "dim" not in given:
        raise TableError("segments: dim missing")
    own = {name: given.pop(name) for name in _OF_A_SEGMENT if name in given}
    betas = given.pop("betas", None)
    if betas is not None:
        if len(betas) != 2:
            raise TableError(f"segments: betas={betas}; expected two")
        given["beta1"], given["beta2"] = betas
    return Segment(**own, hyperparameters={_NAMES.get(k, k): v for k, v in given.items()})


def check_options(table: str, message: TableOptions) -> None:
    """Check what a job gives before there is a model: the optimizer may be the model's own.

    Raises:
        TableError: no table could take it.
    """
    given = options_of(message)
    if segments := given.get("segments"):
        EmbeddingSpec(table, sum(segment.dim for segment in segments), **given)
        return
    kinds = [given["optimizer"]] if "optimizer" in given else list(OPTIMIZERS)
    errors: list[TableError] = []
    for kind in kinds:
        try:
            EmbeddingSpec(table, 1, **{**given, "optimizer": kind})
        except TableError as error:
            errors.append(error)
        else:
            return
    # That of an optimizer which has all of the settings says most.
    named = {_NAMES.get(name, name) for name in given if name in _OF_OPTIMIZER}
    named = named - {"betas"} | ({"beta1"} if "betas" in named else set())
    raise next(
        (
            e
            for kind, e in zip(kinds, errors, strict=True)
            if named <= OPTIMIZERS.get(kind, {}).keys()
        ),
        errors[0],
    )


def _given(message: Message) -> dict[str, Any]:
    """The scalars of a message that are set; `repeated` ones as tuples."""
    given: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.is_repeated:
            given[field.name] = tuple(value)
        elif field.message_type is None:
            given[field.name] = value
    return given
