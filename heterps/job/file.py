"""Job files: YAML in, a checked `JobSpec` out."""

import ast
import os
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from google.protobuf.message import Message

from chassis.near import nearest
from chassis.rooms import IN_A_WORKER, clash
from heterps.job import yaml_nodes
from heterps.job.checkpoints import complete_origin, wrong_checkpoints
from heterps.job.inputs import wrong_inputs
from heterps.job.learning import LOSSES, metric_names, wrong_learning
from heterps.job.offload import complete_offload, wrong_offload
from heterps.job.prepare import IN_PREPARE, is_url
from heterps.job.schema import Reading
from heterps.job.yaml_nodes import YamlError
from protos.job_pb2 import JobSpec
from protos.losses import may_lack_labels
from protos.naming import MOST_SHARDS
from ps.errors import TableError
from ps.table.rules import WIRE_BYTES
from scheduler.methods.names import JOB_METHODS
from workers.embedding.spec import check_options
from workers.model.code.digest import entry_digest, entry_files

_HIDDEN: Final = frozenset(
    (
        *("directory", "code_digest", "entry_digest", "train.resume", "train.routes"),
        *("schedule.offered", "schedule.given"),
    )
)
_NULLABLE: Final = frozenset(("output", "code"))
_REQUIRED: Final = {
    "name": "what the job is called, such as flights",
    "model.entry": "a file and a callable in it, such as model.py:build",
    "data.train": "a file name or glob under data.path, such as train.parquet",
    "schedule.resources": "the file with types, prices and limits, such as resources.yaml",
}
_DEFAULTS: Final[Mapping[str, Any]] = {
    "data.path": ".",
    "train.epochs": 1,
    "train.batch_size": 1024,
    "train.staleness": 1,
    "train.loss": "bce_with_logits",
    "train.precision": "fp32",
    "train.linear": "auto",
    "train.optimizer.name": "adam",
    "train.optimizer.learning_rate": 1e-3,
    "train.optimizer.schedule": "constant",
    "train.rows.schedule": "constant",
    "train.batch_norm": "local",
    "schedule.method": "ppo",
    "schedule.replan": "advise",
}
METHODS: Final = JOB_METHODS
_CHOICES: Final = {
    "train.loss": LOSSES,
    "train.precision": ("fp32", "bf16", "fp16"),
    "train.linear": ("auto", "torch"),
    "train.optimizer.name": ("adam", "adamw", "sgd", "adagrad"),
    "train.optimizer.schedule": ("constant", "cosine"),
    "train.rows.schedule": ("constant", "cosine"),
    "train.batch_norm": ("local", "sync"),
    "servers.durability": ("none", "checkpoint", "log"),
    "servers.wire": tuple(WIRE_BYTES),
    "schedule.method": METHODS,
    "schedule.replan": ("off", "advise", "auto"),
}
# Which optimizers have the keys that not all have.
_OPTIMIZERS_WITH: Final = {
    "momentum": ("sgd",),
    "betas": ("adam", "adamw"),
    "eps": ("adam", "adamw", "adagrad"),
}
_POSITIVE: Final = (
    "train.epochs",
    "train.batch_size",
    "train.optimizer.learning_rate",
    "train.optimizer.eps",
    "schedule.max_price_per_hour",
    "schedule.finish_by_hours",
    "deadline_hours",
)
_NOT_NEGATIVE: Final = (
    "train.optimizer.weight_decay",
    "train.optimizer.momentum",
    "train.clip",
    "schedule.min_throughput",
)
_LEAST_MEMORY: Final = 1 << 16  # bytes that a shard takes for a table
_SHOWN = 12  # problems, so that the message fits one screen


class JobFileError(ValueError):
    """A job file that cannot be used; `problems` has one line for each thing to mend."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        lines = list(self.problems[:_SHOWN])
        if len(self.problems) > _SHOWN:
            lines.append(f"… and {len(self.problems) - _SHOWN} more problems")
        super().__init__("\n".join(lines))


def load_job(path: str | Path, overrides: Iterable[str] | Mapping[str, object] = ()) -> JobSpec:
    """Read, complete and check a job file.

    Args:
        overrides: `a.b=value` texts as of --set, the value in YAML; or a mapping of dotted key to
            value.

    Returns:
        The job with defaults filled in, `directory` absolute, and the resources and the workload
        that it names read in.

    Raises:
        JobFileError: naming file, line, key, value and what was expected.
    """
    shown = str(path)
    file = Path(path).expanduser()
    job = JobSpec()
    reading = Reading(_HIDDEN, _NULLABLE)
    try:
        root = yaml_nodes.read(file, shown)
        for assignment in _assignments(overrides):
            yaml_nodes.override(root, assignment)
        reading.into(job, root)
    except YamlError as error:
        raise JobFileError([str(error)]) from None
    job.directory = str(file.resolve().parent)
    _complete(job, reading)
    check = _Check(job, shown, reading)
    check.values()
    check.files()
    if check.problems:
        raise JobFileError(check.problems)
    return job


def _assignments(overrides: Iterable[str] | Mapping[str, object]) -> list[str]:
    if isinstance(overrides, Mapping):
        import json

        return [f"{key}={json.dumps(value)}" for key, value in overrides.items()]
    return list(overrides)


def _complete(job: JobSpec, reading: Reading) -> None:
    for key, value in _DEFAULTS.items():
        if key not in reading.places:
            message, name = _holder(job, key)
            setattr(message, name, value)
    if "train.loss" not in reading.places and (job.model.loss or job.train.heads):
        job.train.loss = ""
    complete_offload(job, reading.places.keys())


def _holder(job: JobSpec, key: str) -> tuple[Message, str]:
    """The message that a dotted key is a field of, and the field's name."""
    *path, name = key.split(".")
    message: Message = job
    for part in path:
        message = getattr(message, part)
    return message, name


def _value(job: JobSpec, key: str) -> Any:
    message, name = _holder(job, key)
    return getattr(message, name)


class _Check:
    """What the schema alone does not say."""

    def __init__(self, job: JobSpec, shown: str, reading: Reading) -> None:
        self.job = job
        self.problems = reading.problems
        self._shown = shown
        self._places = reading.places

    def values(self) -> None:
        """Required keys, choices and ranges."""
        for key, what in _REQUIRED.items():
            if key not in self._places:
                self.problems.append(f"{self._shown}: {key}: missing; expected {what}")
        for key, choices in _CHOICES.items():
            value = _value(self.job, key)
            if value and value not in choices:
                near = nearest(value, choices)
                hint = f"; did you mean {near}?" if near else ""
                self._wrong(key, repr(value), f"one of {', '.join(choices)}{hint}")
        for key in _POSITIVE:
            if key in self._places and self._sound(key) and _value(self.job, key) <= 0:
                self._wrong(key, f"{_value(self.job, key):g}", "a number above 0")
        for key in _NOT_NEGATIVE:
            if _value(self.job, key) < 0:
                self._wrong(key, f"{_value(self.job, key):g}", "a number of at least 0")
        memory = self.job.servers.memory_bytes
        if 0 < memory < _LEAST_MEMORY:
            self._wrong("servers.memory_bytes", str(memory), f"0 or at least {_LEAST_MEMORY}")
        if (shards := self.job.servers.shards) > MOST_SHARDS:
            self._wrong("servers.shards", str(shards), f"at most {MOST_SHARDS}")
        elastic = self.job.schedule.elastic
        if 0 < elastic.max < elastic.min:
            text = f"at least schedule.elastic.min, {elastic.min}"
            self._wrong("schedule.elastic.max", str(elastic.max), text)
        self._optimizer()
        train = self.job.train
        if train.batch_norm == "sync" and train.micro_batches > 1:
            text = "1, or none: with batch_norm sync a step is one micro-batch"
            self._wrong("train.micro_batches", str(train.micro_batches), text)
        elif 0 < train.batch_size < train.micro_batches:
            text = f"at most the samples of a step, train.batch_size, {train.batch_size}"
            self._wrong("train.micro_batches", str(train.micro_batches), text)
        wrongs = (
            *wrong_checkpoints(self.job, metric_names(self.job)),
            *complete_origin(self.job),
            *wrong_learning(self.job, [*self._places]),
            *wrong_inputs(self.job),
            *wrong_offload(self.job, self._places.keys()),
        )
        for wrong in wrongs:
            if self._sound(wrong.key):
                self._wrong(wrong.key, wrong.got, wrong.expected)
        for name, options in sorted(self.job.tables.items()):
            try:
                check_options(name, options)
            except TableError as error:
                self.problems.append(f"{self._at(f'tables.{name}')}: tables.{name}: {error}")
        self._inputs()

    def _optimizer(self) -> None:
        """Settings that belong to some optimizers only."""
        spec = self.job.train.optimizer
        for name, kinds in _OPTIMIZERS_WITH.items():
            key = f"train.optimizer.{name}"
            here = key in self._places and spec.name in _CHOICES["train.optimizer.name"]
            if here and spec.name not in kinds:
                text = f"no {name} with {spec.name}; it is a setting of {', '.join(kinds)}"
                self._wrong(key, _shown_value(getattr(spec, name)), text)
        if spec.momentum >= 1:
            self._wrong("train.optimizer.momentum", f"{spec.momentum:g}", "a number below 1")
        betas = list(spec.betas)
        right = len(betas) in (0, 2) and all(0 <= beta < 1 for beta in betas)
        if self._sound("train.optimizer.betas") and not right:
            text = "two numbers from 0 to below 1, such as [0.9, 0.999]"
            self._wrong("train.optimizer.betas", _shown_value(betas), text)

    def _inputs(self) -> None:
        data = self.job.data
        inputs = {"data.dense", "data.sparse", "data.tokens", "data.columns"}
        if not inputs & self._places.keys():
            text = "missing; expected data.sparse or data.dense, lists of columns, or data.tokens"
            self.problems.append(f"{self._shown}: data: {text}")
        labelled = {"data.label", "data.labels", "data.tokens"} & self._places.keys()
        if not labelled and not may_lack_labels(self.job):
            text = "missing; expected the column to predict, or data.tokens, which then are"
            self.problems.append(f"{self._shown}: data.label: {text}")
        for key, columns in (("data.dense", data.dense), ("data.sparse", data.sparse)):
            for column in sorted({c for c in columns if list(columns).count(c) > 1}):
                self._wrong(key, f"{column!r} twice", "each column once")
            for label in (data.label, *data.labels):
                if label and label in columns:
                    self._wrong(key, f"the label {label!r}", "columns known before the outcome")

    def files(self) -> None:
        """The files that a job names are there and hold what it needs."""
        self._callable("model.entry", self.job.model.entry, IN_A_WORKER)
        self._callable("model.loss", self.job.model.loss, IN_A_WORKER)
        for entry in self.job.model.metrics:
            self._callable("model.metrics", entry, IN_A_WORKER)
        for entry in self.job.model.callbacks:
            self._callable("model.callbacks", entry, IN_A_WORKER)
        if all(file.is_file() for file in entry_files(self.job)):
            self.job.entry_digest = entry_digest(self.job)
        self._callable("data.source", self.job.data.source, IN_A_WORKER)
        self._callable("data.prepare", self.job.data.prepare, IN_PREPARE)
        self._places_of_files()
        schedule = self.job.schedule
        self._read("schedule.resources", schedule.resources, self._take_resources)
        self._read("schedule.workload", schedule.workload, self._take_workload)
        types = [kind.name for kind in schedule.offered.types]
        if not types:
            return
        for index, name in enumerate(schedule.emulate):
            self._known_type("schedule.emulate", f"schedule.emulate[{index}]", name, types)
        for index, name in enumerate(schedule.exclude):
            self._known_type("schedule.exclude", f"schedule.exclude[{index}]", name, types)
        for layer in sorted(schedule.pin):
            key = f"schedule.pin.{layer}"
            self._known_type(key, key, schedule.pin[layer], types)
            if schedule.pin[layer] in schedule.exclude:
                self._wrong(
                    key, repr(schedule.pin[layer]), "a type that schedule.exclude does not name"
                )

    def _places_of_files(self) -> None:
        """Where code, data and the model are."""
        job = self.job
        root = os.path.normpath(Path(job.directory, job.code or "."))
        if not Path(job.directory).is_relative_to(root):
            self._wrong("code", repr(job.code), "the job file's folder or one above it, such as ..")
        if "://" in job.output:
            self._wrong("output", repr(job.output), "a folder, or none: the scheduler keeps models")
        if is_url(job.data.path) and job.data.prepare:
            text = "a folder, which data.prepare fills; a URL has its files already"
            self._wrong("data.path", repr(job.data.path), text)

    def _callable(self, key: str, entry: str, needed: Collection[str]) -> None:
        if not entry:
            return
        file, colon, name = entry.rpartition(":")
        if not colon or not file or not name.isidentifier():
            self._wrong(key, repr(entry), "FILE.py:NAME, such as model.py:build")
            return
        path = Path(self.job.directory, file)
        if not path.is_file():
            self._missing_file(key, file)
            return
        try:
            tree = ast.parse(path.read_bytes(), str(path))
        except (SyntaxError, ValueError) as error:
            line = getattr(error, "lineno", None)
            at = f" at line {line}" if line else ""
            self._wrong(key, repr(entry), f"Python in {file}; it does not parse{at}: {error}")
            return
        names = _names(tree)
        if name not in names and "*" not in names:
            near = nearest(name, names)
            hint = f"did you mean {file}:{near}? " if near else ""
            self._wrong(
                key, repr(entry), f"a name in {file}; {hint}it has {', '.join(names) or 'none'}"
            )
        root = Path(os.path.normpath(Path(self.job.directory, self.job.code or ".")))
        folders = dict.fromkeys((path.parent, root, Path(self.job.directory)))
        if said := clash(path, list(folders), needed):
            self.problems.append(f"{self._at(key)}: {key}: {said}")

    def _read(self, key: str, file: str, take: Callable[[Path], None]) -> None:
        if not file:
            return
        path = Path(self.job.directory, file)
        if not path.is_file():
            self._missing_file(key, file)
            return
        try:
            take(path)
        except ValueError as error:  # names the file and the key in it
            self.problems.append(f"{self._at(key)}: {key}: {error}")

    def _take_resources(self, path: Path) -> None:
        from heterps.job.resources import load_resources

        self.job.schedule.offered.CopyFrom(load_resources(path).to_message())

    def _take_workload(self, path: Path) -> None:
        from scheduler import load_workload

        self.job.schedule.given.CopyFrom(load_workload(path).to_message())

    def _known_type(self, key: str, shown: str, name: str, types: list[str]) -> None:
        if name not in types:
            near = nearest(name, types)
            hint = f"; did you mean {near}?" if near else ""
            expected = f"a type of {self.job.schedule.resources}: {', '.join(types)}{hint}"
            self.problems.append(f"{self._at(key)}: {shown}: got {name!r}, expected {expected}")

    def _missing_file(self, key: str, file: str) -> None:
        folder = Path(self.job.directory, file).parent
        try:
            near = nearest(Path(file).name, os.listdir(folder))
        except OSError:
            near = ""
        hint = f"; did you mean {Path(file).with_name(near)}?" if near else ""
        self._wrong(key, repr(file), f"a file; there is none at {folder / Path(file).name}{hint}")

    def _sound(self, key: str) -> bool:
        """Whether the schema found the value of the right type."""
        return not any(f": {key}: " in problem for problem in self.problems)

    def _at(self, key: str) -> str:
        return self._places.get(key, self._shown)

    def _wrong(self, key: str, got: str, expected: str) -> None:
        self.problems.append(f"{self._at(key)}: {key}: got {got}, expected {expected}")


def _shown_value(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(list(value))


def _names(tree: ast.Module) -> list[str]:
    """What a module binds at its top level, public names only; "*" where that is not known."""
    found: list[str] = []
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.append(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found += [alias.asname or alias.name for alias in node.names]
        elif isinstance(node, ast.Assign):
            found += [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.append(node.target.id)
        elif not isinstance(node, ast.Expr):
            found.append("*")  # bound under a condition
    return found
