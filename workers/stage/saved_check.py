"""The last thing that a job does: its saved model, opened again, predicts as it was measured."""

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from torch import nn

from protos.job_pb2 import JobSpec
from ps import ParameterClient
from workers.data.reader import Split
from workers.embedding.sparse import SparseEmbedding
from workers.learning.precision import Precision
from workers.model.objective.metrics import JobMetrics
from workers.model.saved.reloaded import check_finite, check_predictions, reopened
from workers.stage.experts.outside import built_in
from workers.stage.running.evaluation import Measured, first_batch
from workers.stage.share import Share

_SPLITS: tuple[Split, ...] = ("test", "valid", "train")  # the first one that there is
_TOLERANCE, _TOLERANCE_OF_DEVICES, _TOLERANCE_16_BITS = 1e-3, 1e-2, 5e-2


class _ShardRows:
    """Rows of a table as the shards have them."""

    def __init__(self, client: ParameterClient, table: str) -> None:
        self._client, self._table = client, table

    def pull(self, keys: NDArray[np.uint64], read_only: bool) -> NDArray[np.float32]:
        return self._client.pull_unique(self._table, keys, read_only=True)

    def push(self, keys: NDArray[np.uint64], grads: NDArray[np.float32]) -> None:
        raise NotImplementedError("a saved model is only read")


def check_saved(
    share: Share, client: ParameterClient, output: str, measured: Mapping[Split, Measured]
) -> None:
    """Open a model that is saved, and predict the first batch of what was predicted again.

    Called where `measured` has its scores.

    Args:
        output: where it is.

    Raises:
        DivergedError: the last update made its weights infinite.
        ReloadError: it predicts something else.
        ModelError, CheckpointError, OSError: it cannot be opened.
    """
    job = share.launch.job
    with built_in(share.folder):
        model = reopened(output, job, lambda table: _ShardRows(client, table))
    check_finite(model)
    split: Split = next(each for each in _SPLITS if each in measured)
    if (scores := measured[split].first) is None:
        return
    batch = first_batch(share.held_out, split, share.place.widths[0])
    if batch is None:
        return
    tolerance = _TOLERANCE if share.device.type == "cpu" else _TOLERANCE_OF_DEVICES
    if share.precision.dtype is not None or _travels_short(job, model):
        tolerance = _TOLERANCE_16_BITS
    computing = Precision(share.precision.dtype, "cpu").computing
    check_predictions(model, JobMetrics(job), batch, scores, computing, tolerance, output)


def _travels_short(job: JobSpec, model: nn.Module) -> bool:
    """Whether rows of some table travel in 16 bits."""
    specs = (layer.spec for layer in model.modules() if isinstance(layer, SparseEmbedding))
    return any((spec.wire or job.servers.wire or "float32") != "float32" for spec in specs)
