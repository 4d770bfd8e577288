"""What a layer keeps in memory while it trains."""

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from workers.profiling.timing import LayerTimer

_COPIES = 3  # of a weight: itself, its gradient, and its place in the flat buffer of the reduction


def layer_memory(
    timer: LayerTimer, index: int, values: dict[str, Tensor], row_bytes: int
) -> tuple[float, list[Tensor]]:
    """Bytes that one layer holds for one batch, and its outputs, which join `values`.

    Counted are weights with gradient and reduction buffer, the optimizer's state, what autograd
    saved for backward (each storage once), the outputs and their gradients, and the rows of
    embeddings with their gradients.
    """
    weights = {p.data_ptr() for p in timer.parameters[index]}
    saved: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        outputs = timer.run_layer(index, values)
    weight_bytes = sum(p.nbytes for p in timer.parameters[index])
    optimizer = timer.optimizers[index]
    states = optimizer.state.values() if optimizer is not None else ()
    state_bytes = sum(
        value.nbytes for state in states for value in state.values() if isinstance(value, Tensor)
    )
    kept = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in outputs}
    own = sum(kept.values())
    retained = sum(size for place, size in saved.items() if place not in kept)
    total = _COPIES * weight_bytes + state_bytes + retained + 2 * own + 2 * row_bytes
    return float(total), outputs
