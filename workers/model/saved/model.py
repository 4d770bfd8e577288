"""A trained model on disk: dense weights, tables, and what is needed to run it again.

Layout of OUTPUT: `dense.safetensors`, `tables/` (a parameter-server checkpoint), `loss.csv`,
`code/`, and `model.json`, which is written last: a folder without
it is no model. It has the checksum of the tables, so that dense weights of one attempt at a job
and tables of another are no model either. Where the scheduler keeps it, the same files have the
same names there.
"""

import errno
import hashlib
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict, ParseDict
from safetensors.torch import load_file
from torch import Tensor, nn

from chassis import written
from chassis.entries import modules_of
from chassis.files import open_regular, replace_file
from protos.job_pb2 import JobSpec
from protos.naming import KEPT, table_prefix
from ps.checkpoint.artifact_store import ArtifactStore
from ps.checkpoint.manifest import is_checkpoint
from ps.checkpoint.places import open_store
from ps.checkpoint.sealed import seal
from ps.checkpoint.store import LocalStore, Store
from ps.checkpoint.tables import chain, save_of
from ps.errors import ReplacedError
from workers.embedding.sparse import SparseEmbedding
from workers.model.code.brought import copy_code, settle
from workers.model.code.entry import ModelError, job_model
from workers.model.module.state import load_state, single
from workers.model.objective.curve import LossCurve
from workers.model.saved.cut import MANIFEST as CUT
from workers.model.saved.cut import check_tables, read_cut, weights_of
from workers.model.saved.dense_file import chunks_of, read_from
from workers.model.saved.facts import DENSE, MODEL, check_dense, read_facts
from workers.model.saved.likeness import Likeness, check_likeness
from workers.model.saved.predict import add_predictor
from workers.model.saved.unfinished import Unfinished

FORMAT = "heterps-model-1"
_LEAST_BYTES = 64 << 10  # of a model's small files
_NO_ANSWER = (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS)  # file systems that cannot tell


def saved_model(output: str, attempt: int, generation: int) -> "SavedModel | KeptModel":
    """The model to write at a folder, or with the scheduler."""
    if output.startswith(KEPT):
        return KeptModel(ArtifactStore(output))
    return SavedModel(output, attempt, generation)


class SavedModel:
    """The folder being written: OUTPUT.partial until it is complete."""

    def __init__(self, output: str, attempt: int = 1, generation: int = 0) -> None:
        self._writer = attempt, generation
        self.final = Path(output)
        self._unfinished = Unfinished.of(self.final)
        self.folder = self._unfinished.folder

    @property
    def tables(self) -> str:
        """Where the parameter servers save."""
        return str(self.folder / "tables")

    def require_room(self, size: int) -> None:
        """See that the disk takes so many bytes more, before they have been computed.

        Raises:
            OSError: it does not, or cannot be written to.
        """
        size = max(size, _LEAST_BYTES)
        there = next(folder for folder in self.final.absolute().parents if folder.is_dir())
        probe = there / f".{self.final.name}.room-{os.getpid()}"
        try:
            with probe.open("wb") as stream:
                os.posix_fallocate(stream.fileno(), 0, size)
        except OSError as error:
            if error.errno not in _NO_ANSWER:
                told = f"{error.strerror}: a model of {size:,} bytes or more is to be saved there"
                raise OSError(error.errno, told, str(self.final)) from None
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def abandon(self) -> None:
        """Leave nothing of a model that will not be finished, unless others write it."""
        self._unfinished.remove(*self._writer)

    def write_stage(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Write one stage's dense weights."""
        self.require_room(sum(one.nbytes for one in state.values()))
        written.claim(self.folder)
        self._unfinished.claim(*self._writer)
        path = self.folder / _part(stage)
        unfinished = Path(f"{path}.tmp")  # one name: what a killed worker left is written over
        LocalStore(self.folder).write(unfinished.name, chunks_of(single(state)))
        os.replace(unfinished, path)

    def finish(self, job: JobSpec, stages: int, curve: LossCurve, facts: Mapping[str, Any]) -> str:
        """Merge the stages' weights, write the manifest and give the folder its name."""
        written.claim(self.folder)
        merged: dict[str, Tensor] = {}
        parts = [self.folder / _part(i) for i in range(stages)]
        for part in parts:
            merged.update(load_file(part))
        dense = LocalStore(self.folder).write(DENSE, chunks_of(merged))
        for part in parts:
            part.unlink()
        copy_code(job, self.folder / "code")
        (self.folder / "loss.csv").write_text(curve.as_csv())
        tables = open_store(self.tables)
        replace_file(self.folder / MODEL, _manifest(job, facts, tables, dense.sha256))
        self._unfinished.settle()
        earlier = self.final.with_name(f".{self.final.name}.earlier-{os.getpid()}")
        with suppress(FileNotFoundError):  # there is one if nobody heard of an attempt's end
            os.replace(self.final, earlier)
        os.replace(self.folder, self.final)
        shutil.rmtree(earlier, ignore_errors=True)
        return str(self.final)


class KeptModel:
    """The files that the scheduler keeps: machines without a common disk meet there."""

    def __init__(self, store: ArtifactStore) -> None:
        self._store = store

    def require_room(self, size: int) -> None:
        """See that the scheduler takes so many bytes more, before they have been computed.

        Raises:
            OSError: it does not.
        """
        self._store.require_room(max(size, _LEAST_BYTES))

    def abandon(self) -> None:
        """What was sent goes when room is needed."""

    @property
    def tables(self) -> str:
        """Where the parameter servers save."""
        return f"{self._store.url}/tables"

    def write_stage(self, stage: int, state: Mapping[str, Tensor]) -> None:
        """Send one stage's dense weights."""
        self._store.write(_part(stage), chunks_of(single(state)))

    def finish(self, job: JobSpec, stages: int, curve: LossCurve, facts: Mapping[str, Any]) -> str:
        """Merge the stages' weights and send them; the manifest comes last.

        The job's code is there already: the scheduler kept it when the job was submitted.
        """
        merged: dict[str, Tensor] = {}
        for stage in range(stages):
            with self._store.open(_part(stage)) as stream:
                merged.update(read_from(stream, lambda _: None))
        dense = self._store.write(DENSE, chunks_of(merged))
        self._store.write("loss.csv", [curve.as_csv().encode()])
        for stage in range(stages):
            self._store.remove(_part(stage))
        tables = open_store(self.tables)
        self._store.replace(MODEL, _manifest(job, facts, tables, dense.sha256))
        return self._store.url


def _part(stage: int) -> str:
    return f"stage-{stage}.safetensors"


def _manifest(job: JobSpec, facts: Mapping[str, Any], tables: Store, dense: str) -> bytes:
    tree = {"format": FORMAT, "job": MessageToDict(job, preserving_proto_field_name=True), **facts}
    if is_checkpoint(tables):
        tree["tables"] = save_of(chain(tables))
    return seal({**tree, DENSE: dense})


@dataclass(frozen=True, slots=True)
class Saved:
    """A model on disk.

    Attributes:
        job: that trained it.
        job_id: its id, which begins the names of its tables.
        code: the folder where its code would have come along.
        weights: dense ones, by their names in the model.
        tables: where they lie.
        save: the checksum of the save that they must be; any where it is empty.
        likeness: what the model's code made of weights in training; nothing where nobody looked.
    """

    job: JobSpec
    job_id: str
    code: Path
    weights: Mapping[str, Tensor]
    tables: str
    save: str
    likeness: Likeness = field(default_factory=dict)


def read_saved(path: str | Path) -> Saved:
    """What lies at the folder of a model, or of a cut; arguments and errors are those of `load`."""
    folder = Path(path)
    if (folder / CUT).is_file():
        cut, cuts = read_cut(str(folder.absolute())), folder.absolute().parent
        weights = weights_of(str(cuts), cut)
        tables = check_tables(str(cuts), cut.tables)
        return Saved(cut.job, cut.job_id, cuts / "code", weights, tables, cut.tables.save)
    manifest = folder / MODEL
    if not manifest.is_file():
        raise ModelError(f"{folder}: no saved model: model.json is missing")
    facts = read_facts(open_store(folder))
    if facts.get("format") != FORMAT:
        raise ModelError(f"{manifest}: format: {facts.get('format')!r}; expected {FORMAT!r}")
    job = ParseDict(facts["job"], JobSpec())
    with open_regular(folder / DENSE) as stream:
        check_dense(facts, hashlib.file_digest(stream, "sha256").hexdigest(), str(folder))
    weights = load_file(folder / DENSE)
    code, tables = folder.absolute() / "code", str(folder / "tables")
    save, alike = facts.get("tables", ""), facts.get("likeness", {})
    return Saved(job, facts["job_id"], code, weights, tables, save, alike)


def load(path: str | Path) -> nn.Module:
    """A saved model, ready to predict in this process: `forward(sparse, dense)`.

    `model.predict(data)` takes the columns that its job reads; see `Predictor`.

    Args:
        path: the model's folder, or that of a cut of a job: what the model was after its steps.

    Raises:
        ModelError: the folder is no saved model, its code is not there, or its tables are others
            than it was saved with.
        CutError: a cut is damaged.
        CheckpointError: its tables are damaged.
    """
    return opened(read_saved(path))


def opened(saved: Saved) -> nn.Module:
    """The model, on the host, in evaluation; errors are those of `load`."""
    from ps import LocalTable

    job = saved.job
    settle(job, saved.code)
    with modules_of(Path(job.directory)):
        model = job_model(job, weights_follow=True)
        check_likeness(model, job, saved.likeness, job.model.entry)
    load_state(model, saved.weights)
    try:
        tables = LocalTable.load_checkpoint(saved.tables, save=saved.save)
    except ReplacedError:
        raise ModelError(
            f"{saved.tables}: not the tables that the model was saved with, by model.json"
        ) from None
    for layer in model.modules():
        if isinstance(layer, SparseEmbedding):  # without a table where forward does not call it
            layer.store = tables.get(table_prefix(saved.job_id) + layer.spec.table)
            layer.remote = layer.store is None  # rows that it made would be first values
    return add_predictor(model.eval(), job)
