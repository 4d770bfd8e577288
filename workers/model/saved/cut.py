"""A cut of a running job as files: all that its training goes on from after so many updates.

Layout, where the job's cuts lie:

    <step>/cut.json             written last; a folder without it is no cut
    dense/<sha256>.safetensors  one layer's weights, or what its optimizer keeps; by content, so
                                that what did not change is written once
    tables/<step>-<attempt>/    a save of the parameter servers, perhaps a delta on another
    code/                       the job's code, where it brought any
    attempt                     the job and its newest attempt that takes cuts here

Nothing is believed that is not as `cut.json` says, and that is not without its own checksum.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.json_format import ParseError as JobError
from safetensors import SafetensorError
from safetensors.torch import load as load_bytes
from safetensors.torch import save as save_bytes
from torch import Tensor

from protos.job_pb2 import JobSpec
from ps.checkpoint.bounds import Fields, parse_json, read_at_most
from ps.checkpoint.places import open_store
from ps.checkpoint.tables import chain, save_of
from ps.errors import CheckpointError
from workers.device.mapped import read_into
from workers.learning.averages import AVERAGE
from workers.model.objective.curve import LossCurve
from workers.model.saved.in_files import packed, unpacked

FORMAT = "heterps-cut-1"
MANIFEST = "cut.json"
# Kinds of files: the first is what predictions need, unless the other has averages of weights.
WEIGHTS, OPTIMIZER = "weights", "optimizer"
_MOST_MANIFEST = 64 << 20  # bytes


class CutError(ValueError):
    """A cut that is gone or damaged."""


class UnfitCutError(ValueError):
    """A cut of another job, model or training."""


@dataclass(frozen=True, slots=True)
class PartFile:
    """A file of `dense`."""

    sha256: str
    bytes: int

    @property
    def name(self) -> str:
        """Its name there."""
        return f"{self.sha256}.safetensors"


@dataclass(frozen=True, slots=True)
class LayerFiles:
    """The files of a layer by their kinds; those of state that no layer has go by no name."""

    name: str
    files: Mapping[str, PartFile]


@dataclass(frozen=True, slots=True)
class ScaleState:
    """How far the loss scale is.

    Attributes:
        value: after all verdicts.
        good: steps in a row that were applied.
        steps: the scales of the steps that may be open, from the next one on.
    """

    value: float
    good: int
    steps: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Validated:
    """What the held-out data gave in the course of a training.

    Attributes:
        step: how many steps were over.
        metrics: those that are finite.
    """

    step: int
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class TablesSave:
    """The tables of a cut.

    Attributes:
        folders: in `tables`, the oldest first: a whole save, and deltas on it.
        save: which save that is, as of `ps.checkpoint.tables.save_of`.
    """

    folders: tuple[str, ...]
    save: str


@dataclass(frozen=True, slots=True)
class Cut:
    """What `cut.json` says.

    Attributes:
        attempt: that took it.
        step: how many steps are in it.
        samples: of these.
        applied: those of them that were not skipped.
        staleness: updates that a step lacks.
        micro_batches: of a step, by the plan.
        scales: None where losses are not scaled.
        layers: in the order of the model.
        losses: a `LossCurve`.
        metrics: of held-out data, where they were measured.
        validated: what that gave so far, of `train.validate`.
        train_seconds: of all attempts.
        position: where the data of the next step is read from, of a source that said it.
        contents: of the job's splits, as of `Dataset`, a line each; empty: nobody knows.
        taken_at: seconds since the epoch.
        size: bytes written for it.
        seconds, stall_s: as of `heterps.v1.Cut`.
    """

    job_id: str
    attempt: int
    step: int
    samples: int
    applied: int
    staleness: int
    micro_batches: int
    scales: ScaleState | None
    job: JobSpec
    layers: tuple[LayerFiles, ...]
    losses: PartFile
    tables: TablesSave
    metrics: Mapping[str, float] = field(default_factory=dict)
    validated: Sequence[Validated] = ()
    train_seconds: float = 0.0
    position: str = ""
    contents: str = ""
    taken_at: float = 0.0
    size: int = 0
    seconds: float = 0.0
    stall_s: float = 0.0

    def files(self) -> set[str]:
        """Names of all its files in `dense`."""
        parts = [part.name for layer in self.layers for part in layer.files.values()]
        return {self.losses.name, *parts}

    def written(self) -> bytes:
        """The text of cut.json."""
        tree: dict[str, Any] = {
            "format": FORMAT,
            "job_id": self.job_id,
            "attempt": self.attempt,
            "step": self.step,
            "samples": self.samples,
            "applied": self.applied,
            "staleness": self.staleness,
            "micro_batches": self.micro_batches,
            "scales": None
            if self.scales is None
            else {
                "value": self.scales.value,
                "good": self.scales.good,
                "steps": [{"scale": scale} for scale in self.scales.steps],
            },
            "job": MessageToDict(self.job, preserving_proto_field_name=True),
            "layers": [
                {"name": layer.name, "files": files_as_json(layer.files)} for layer in self.layers
            ],
            "losses": files_as_json({"": self.losses})[""],
            "tables": {"folders": list(self.tables.folders), "save": self.tables.save},
            "metrics": dict(self.metrics),
            "validated": [
                {"step": one.step, "metrics": dict(one.metrics)} for one in self.validated
            ],
            "train_seconds": self.train_seconds,
            "position": self.position,
            "contents": self.contents,
            "taken_at": self.taken_at,
            "bytes": self.size,
            "seconds": self.seconds,
            "stall_s": self.stall_s,
        }
        tree["checksum"] = _checksum(tree)
        return (json.dumps(tree, indent=1) + "\n").encode()


def files_as_json(files: Mapping[str, PartFile]) -> dict[str, Any]:
    """Files by kind, as in cut.json."""
    return {kind: {"sha256": f.sha256, "bytes": f.bytes} for kind, f in files.items()}


def files_of(fields: Mapping[str, Any], where: str) -> dict[str, PartFile]:
    """The other way round.

    Raises:
        CheckpointError: they are none.
    """
    return {kind: part_file(Fields(each, f"{where}: {kind}")) for kind, each in fields.items()}


def split_place(place: str) -> tuple[str, str]:
    """Where a job's cuts lie, and the folder of one, from the place of that one."""
    cuts, _, folder = place.rstrip("/").rpartition("/")
    return cuts, folder


def read_cut(place: str) -> Cut:
    """Read and check what the cut.json in a folder says.

    Raises:
        CutError: it is missing or damaged.
    """
    store = open_store(place)
    name = f"{store.url}/{MANIFEST}"
    try:
        with store.open(MANIFEST) as stream:
            data = read_at_most(stream, _MOST_MANIFEST, name)
        return _parsed(data, name)
    except (CheckpointError, JobError, OSError) as error:
        raise CutError(f"{store.url}: no cut to go on from: {error}") from None


def _parsed(data: bytes, name: str) -> Cut:
    fields = parse_json(data, name, "the manifest of a cut")
    tree = json.loads(data)
    if tree.get("checksum") != _checksum({k: v for k, v in tree.items() if k != "checksum"}):
        raise CheckpointError(f"{name}: checksum: not that of what it says")
    fields.text("checksum")
    if (found := fields.text("format")) != FORMAT:
        raise CheckpointError(f"{name}: format: {found!r}; expected {FORMAT!r}")
    fields.default("validated", [])
    fields.default("position", "")
    fields.default("contents", "")
    losses, tables, scales = fields.one("losses"), fields.one("tables"), fields.one("scales")
    if losses is None or tables is None:
        raise CheckpointError(f"{name}: losses and tables: null; expected objects")
    cut = Cut(
        job_id=fields.text("job_id"),
        attempt=fields.count("attempt"),
        step=fields.count("step", 1),
        samples=fields.count("samples"),
        applied=fields.count("applied"),
        staleness=fields.count("staleness"),
        micro_batches=fields.count("micro_batches"),
        scales=None if scales is None else _scales(scales),
        job=ParseDict(fields.mapping("job"), JobSpec(), ignore_unknown_fields=True),
        layers=tuple(
            LayerFiles(layer.text("name"), files_of(layer.mapping("files"), name))
            for layer in fields.objects("layers")
        ),
        losses=part_file(losses),
        tables=TablesSave(tables.texts("folders"), tables.text("save")),
        metrics=_metrics(fields),
        validated=tuple(_validated(each) for each in fields.objects("validated")),
        train_seconds=fields.number("train_seconds"),
        position=fields.text("position"),
        contents=fields.text("contents"),
        taken_at=fields.number("taken_at"),
        size=fields.count("bytes"),
        seconds=fields.number("seconds"),
        stall_s=fields.number("stall_s"),
    )
    fields.end()
    return cut


def _scales(fields: Fields) -> ScaleState:
    value, good = fields.number("value"), fields.count("good")
    steps = tuple(each.number("scale") for each in fields.objects("steps"))
    fields.end()
    return ScaleState(value, good, steps)


def _validated(fields: Fields) -> Validated:
    validated = Validated(fields.count("step", 1), _metrics(fields))
    fields.end()
    return validated


def _metrics(fields: Fields) -> dict[str, float]:
    return {name: float(value) for name, value in fields.mapping("metrics").items()}


def part_file(fields: Fields) -> PartFile:
    """What a file is said to be.

    Raises:
        CheckpointError: that is none.
    """
    part = PartFile(fields.text("sha256", 64), fields.count("bytes"))
    if len(part.sha256) != 64 or not set(part.sha256) <= set("0123456789abcdef"):
        raise fields.wrong("sha256", part.sha256, "64 hexadecimal digits")
    fields.end()
    return part


def _checksum(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


class DenseFiles:
    """The files by content of a job's cuts."""

    def __init__(self, cuts: str) -> None:
        self._store = open_store(f"{cuts}/dense")
        self._there: set[str] | None = None
        self.bytes = 0  # written

    def write(self, tensors: Mapping[str, Tensor]) -> PartFile:
        """Write tensors on the host; nothing where a file has just these.

        A file is there whole or not at all, so one that is there can be trusted.
        """
        data = packed(tensors, save_bytes)
        part = PartFile(hashlib.sha256(data).hexdigest(), len(data))
        if self._there is None:
            self._there = set(self._store.entries())
        if part.name not in self._there:
            self._store.replace(part.name, data)
            self._there.add(part.name)
            self.bytes += len(data)
        return part

    def write_losses(self, curve: LossCurve) -> PartFile:
        """Write the losses of a job's steps."""
        return self.write(curve.tensors())

    def read_losses(self, part: PartFile) -> LossCurve:
        """The losses of a job's steps; raises as `read`."""
        return LossCurve.take(self.read(part))

    def read(self, part: PartFile, folder: Path | None = None) -> dict[str, Tensor]:
        """The tensors of a file.

        Args:
            folder: for a copy of it, in which they lie; None: they are read into memory.

        Raises:
            CutError: it is missing, or is not what it was.
        """
        name = f"{self._store.url}/{part.name}"
        try:
            with self._store.open(part.name) as stream:
                data: bytes | memoryview
                if folder is None:
                    data = read_at_most(stream, part.bytes, name)
                else:
                    data = read_into(stream, part.bytes, folder)
            if hashlib.sha256(data).hexdigest() != part.sha256:
                raise CheckpointError(f"{name}: its checksum is another one")
            if not isinstance(data, bytes):
                return unpacked(data)
            found: dict[str, Tensor] = load_bytes(data)
            return found
        except (CheckpointError, OSError, SafetensorError) as error:
            raise CutError(f"{name}: {error}") from None

    def keep(self, names: set[str]) -> None:
        """Remove all others."""
        for name in self._store.entries():
            if name not in names:
                self._store.remove(name)


def check_tables(cuts: str, tables: TablesSave) -> str:
    """Where the tables of a cut lie, when they are those that it was taken with.

    Raises:
        CutError: they are not.
    """
    place = f"{cuts}/tables/{tables.folders[-1]}" if tables.folders else ""
    try:
        if not place or save_of(chain(open_store(place))) != tables.save:
            raise CheckpointError("not the tables that the cut was taken with")
    except (CheckpointError, OSError) as error:
        raise CutError(f"{place or cuts}: {error}") from None
    return place


def weights_of(cuts: str, cut: Cut) -> dict[str, Tensor]:
    """The weights of all layers of a cut, by their names in the model; averages where it has them.

    Raises:
        CutError: a file is missing or damaged.
    """
    dense = DenseFiles(cuts)
    found: dict[str, Tensor] = {}
    for layer in cut.layers:
        if WEIGHTS in layer.files:
            found |= dense.read(layer.files[WEIGHTS])
    for layer in cut.layers if cut.job.train.ema else ():
        kept = dense.read(layer.files[OPTIMIZER]) if OPTIMIZER in layer.files else {}
        for name, tensor in kept.items():
            key, _, of = name.partition(":")
            if key == AVERAGE:
                found[of] = tensor
    return found
