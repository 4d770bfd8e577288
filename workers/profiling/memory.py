"""What a layer keeps in memory while it trains, and how much of a model is profiled at once."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workers.device.mapped import lies_in
from workers.model.chain.trace import TracedModel
from workers.profiling.timing import LayerTimer, parameters_of

_COPIES = 3  # of a weight: itself, its gradient, and its place in the flat buffer of the reduction
_OPTIMIZER = 2  # of a weight: what Adam keeps, and no optimizer here more


def weights_of(traced: TracedModel) -> list[int]:
    """Bytes of each layer's dense parameters; what layers share is of the first of them.

    Experts that are to lie out of memory are not counted.
    """
    graphs = (traced.layer(index) for index in range(len(traced.layers)))
    return [sum(p.nbytes for p in own if lies_in(p) is None) for own in parameters_of(graphs)]


def runs_within(
    weights: Sequence[int], versions: int, most: float, *, on_host: bool
) -> list[range]:
    """Runs of layers whose training one worker has memory for; none where it has for all of them.

    Args:
        weights: bytes of each layer's.
        versions: of weights that training keeps, with a gradient of each.
        most: bytes of a unit; 0 where nothing is known of them.
        on_host: whether the worker computes where the whole model is: those weights count, too.
    """
    whole = sum(weights)
    if not most or (2 * versions + _OPTIMIZER) * whole <= most:
        return []
    room = most - whole if on_host else most
    copies = _COPIES - 1 + _OPTIMIZER + (not on_host)  # beside weights that are there anyway
    runs, begin, taken = [], 0, 0
    for index, own in enumerate(weights):
        if index > begin and copies * (taken + own) > room:
            runs.append(range(begin, index))
            begin, taken = index, 0
        taken += own
    return [*runs, range(begin, len(weights))]


@dataclass(frozen=True, slots=True)
class LayerBytes:
    """Memory of one layer.

    Args:
        weights: dense parameters.
        optimizer: what their optimizer keeps, and the memory for experts that lie out of it.
        saved: what autograd saved for the backward of one micro-batch, each storage once.
        rows: pulled embedding rows of one micro-batch.
        outputs: of one micro-batch, those that were saved not counted.
        disk: for experts that lie out of memory.
    """

    weights: float
    optimizer: float
    saved: float
    rows: float
    outputs: float
    disk: float = 0.0

    @property
    def activations(self) -> float:
        """What stays from forward to backward of a micro-batch: rows with their gradients, too."""
        return self.saved + 2 * self.rows

    @property
    def total(self) -> float:
        """With gradients and the reduction's buffer, and one micro-batch."""
        kept = self.activations + 2 * self.outputs
        return _COPIES * self.weights + self.optimizer + kept


def layer_bytes(
    timer: LayerTimer, index: int, values: dict[str, Any], row_bytes: int
) -> tuple[LayerBytes, list[Tensor]]:
    """Run a layer whose rows are bound on one micro-batch; its outputs join `values`, too."""
    weights = {p.data_ptr() for p in timer.graphs[index].module.parameters()}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = timer.run_layer(index, values)
    optimizer = timer.optimizers[index]
    states = optimizer.state.values() if optimizer is not None else ()
    made = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}
    counted = LayerBytes(
        weights=sum(p.nbytes for p in timer.parameters[index]),
        optimizer=sum(v.nbytes for s in states for v in s.values() if isinstance(v, Tensor))
        + timer.room_of(index),
        saved=sum(saved.values()),
        rows=row_bytes,
        outputs=sum(size for place, size in made.items() if place not in saved),
        disk=timer.disk_of(index),
    )
    return counted, outputs
