"""A model that has just been saved is opened again, and must predict as it did in training."""

import inspect
import logging
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from protos.job_pb2 import JobSpec
from protos.naming import table_prefix
from ps.checkpoint.manifest import read_manifest
from ps.checkpoint.places import open_store
from ps.checkpoint.tables import load_tables, read_save
from ps.local.table import LocalTable
from workers.data.columns.arrays import labels_in
from workers.embedding.sparse import RowStore, SparseEmbedding
from workers.errors import DivergedError
from workers.model.code.entry import job_model
from workers.model.module.inputs import arguments_of
from workers.model.module.state import load_state
from workers.model.objective.metrics import JobMetrics
from workers.model.saved.facts import read_dense, read_facts
from workers.moe.layer import MoE

_log = logging.getLogger("heterps.stage")
MOST_TABLE_BYTES = 256 << 20  # beyond which rows are asked of the shards that have saved them
_ROWS_AT_ONCE = 65536
_VALUES_AT_ONCE = 1 << 18
_ROUTED_ELSEWHERE = 0.01  # share of samples that rounding may send to another expert


class ReloadError(RuntimeError):
    """A saved model that does not predict as it was measured."""


def reopened(output: str, job: JobSpec, shard_rows: Callable[[str], RowStore]) -> nn.Module:
    """The model saved at a folder or URL, on the host, in evaluation.

    Its code is taken from where the job has it in this process.

    Args:
        output: as `finish` of the saved model gave it.
        shard_rows: rows of a table on the shards, by its full name; asked where tables are large.

    Raises:
        ModelError, CheckpointError, OSError: it cannot be opened.
    """
    store = open_store(output)
    facts = read_facts(store)
    job_id = facts["job_id"]
    model = job_model(job, weights_follow=True)
    load_state(model, read_dense(store, facts))
    layers = [m for m in model.modules() if isinstance(m, SparseEmbedding)]
    if layers:
        place = open_store(f"{output}/tables")
        files = read_manifest(place).files
        names = {file.table for file in files if file.table}
        tables: Mapping[str, RowStore]
        if sum(file.bytes for file in files) <= MOST_TABLE_BYTES:
            read, _ = read_save(
                place.url, lambda links: load_tables(links, directory=tempfile.gettempdir())
            )
            tables = {name: LocalTable(table.spec, table.native) for name, table in read.items()}
        else:
            tables = {name: shard_rows(name) for name in names}
        for layer in layers:
            layer.store = tables.get(table_prefix(job_id) + layer.spec.table)
    return model.eval()


def check_finite(model: nn.Module) -> None:
    """Refuse what an update has made infinite, after which no loss was seen that had part in it.

    Of the rows all are looked at that the saved model has here.

    Raises:
        DivergedError: names a weight, or a table and a key.
    """
    for name, weight in model.named_parameters():
        parts = weight.detach().flatten().split(_VALUES_AT_ONCE)
        if weight.requires_grad and not all(part.isfinite().all() for part in parts):
            raise DivergedError(f"after the last step {name!r} is not finite")
    stores = {m.spec.table: m.store for m in model.modules() if isinstance(m, SparseEmbedding)}
    for table, store in stores.items():
        if not isinstance(store, LocalTable):
            continue
        keys = store.keys()
        for first in range(0, len(keys), _ROWS_AT_ONCE):
            some = keys[first : first + _ROWS_AT_ONCE]
            wrong = ~np.isfinite(store.pull(some, read_only=True)).all(axis=1)
            if wrong.any():
                raise DivergedError(
                    f"after the last step the row of key {some[wrong.argmax()]} of table {table!r} "
                    "is not finite"
                )


@torch.no_grad()
def check_predictions(
    model: nn.Module,
    metrics: JobMetrics,
    batch: Mapping[str, Tensor],
    measured: Mapping[str, Tensor],
    computing: Callable[[], AbstractContextManager[object]],
    tolerance: float,
    where: str,
) -> None:
    """Hold a model's predictions against those of the same samples in training.

    Args:
        batch: samples, with their labels.
        measured: what the model gave for them, as of `JobMetrics.scores`.
        computing: the context of a forward, for mixed precision.
        tolerance: by which scores may differ, absolutely and relative to their size.
        where: the model is, for the error.

    Raises:
        ReloadError: they differ; says where and by how much.
    """
    arguments = arguments_of(inspect.signature(model.forward).parameters, batch)

    def scores(name: str) -> Tensor:
        with computing():
            outputs = model(**arguments)
        wide = tree_map(lambda output: output.float(), outputs)
        return metrics.scores(wide, labels_in(batch))[name]

    for name, expected in measured.items():
        _check(partial(scores, name), expected, model, tolerance, where)


def _check(
    scores: Callable[[], Tensor], measured: Tensor, model: nn.Module, tolerance: float, where: str
) -> None:
    found = scores()
    unlike = ~torch.isclose(found, measured, rtol=tolerance, atol=tolerance, equal_nan=True)
    wrong = unlike.reshape(len(unlike), -1).any(dim=1) if unlike.ndim else unlike.reshape(1)
    allowed = 0.0
    if any(isinstance(module, MoE) for module in model.modules()):
        allowed = _ROUTED_ELSEWHERE * len(found)
    if int(wrong.sum()) <= allowed:
        return
    if not torch.equal(scores().nan_to_num(), found.nan_to_num()):
        _log.warning("predictions of the saved model are random, and so cannot be compared")
        return
    row = int(wrong.int().argmax())
    raise ReloadError(
        f"{where}: the saved model, loaded again, predicts {_first(found, unlike, row):g} for "
        f"sample {row} where training's own evaluation gave {_first(measured, unlike, row):g}; "
        f"{int(wrong.sum())} of {len(wrong)} samples differ by more than {tolerance:g}. Something "
        "that predictions depend on is not in the model's state_dict, or is changed by it: keep "
        "it in parameters, buffers or SparseEmbedding layers"
    )


def _first(values: Tensor, unlike: Tensor, row: int) -> float:
    """The first value of a sample that is unlike."""
    if not values.ndim:
        return float(values)
    return float(values[row].reshape(-1)[int(unlike[row].reshape(-1).int().argmax())])
