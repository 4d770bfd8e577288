"""What a file of experts is made of: layers, each of which gives one expert after the other."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor, nn

from workers.moe.layer import MoE
from workers.offload.experts.layout import ExpertFileError, LayerAt, TensorAt, check_dtype


@dataclass(frozen=True, slots=True)
class Source:
    """A layer, and the tensors of one of its experts in the order of `layer.tensors`."""

    layer: LayerAt
    expert: Callable[[int], Sequence[Tensor]]


def moe_layers(model: nn.Module) -> dict[str, MoE]:
    """The MoE layers of a model by name, in its order.

    Raises:
        ExpertFileError: there is none, or its experts are elsewhere.
    """
    found = {name: one for name, one in model.named_modules() if isinstance(one, MoE)}
    if not found:
        raise ExpertFileError(f"{type(model).__name__}: expected a model with heterps.MoE layers")
    for name, layer in found.items():
        if layer.parallel is not None:
            raise ExpertFileError(f"{name}: expected all experts in this process, it is split")
        if layer.outside is not None:
            raise ExpertFileError(f"{name}: its experts are out of memory already")
    return found


def of_model(model: nn.Module) -> list[Source]:
    """The experts of a model; those on the device meta have sizes alone.

    Raises:
        ExpertFileError: it has no MoE layers, or experts of one that differ in their tensors.
    """
    return [_of_layer(name, layer) for name, layer in moe_layers(model).items()]


def tensors_of(layer: MoE, expert: int) -> dict[str, Tensor]:
    """One expert's parameters by name; views."""
    if layer.experts is not None:
        return {name: one.detach() for name, one in layer.experts[expert].named_parameters()}
    return {"w1": layer.w1.detach()[expert], "w2": layer.w2.detach()[expert]}


def _of_layer(name: str, layer: MoE) -> Source:
    first = tensors_of(layer, 0)
    for e in range(1, layer.num_experts):
        other = tensors_of(layer, e)
        if _signature(other) != _signature(first):
            raise ExpertFileError(
                f"{name}: expert {e}: expected the parameters of expert 0, {_signature(first)}, "
                f"got {_signature(other)}"
            )
    if not first:
        raise ExpertFileError(f"{name}: expected experts with parameters, they have none")
    tensors = tuple(
        TensorAt(key, check_dtype(one.dtype, f"{name}.{key}"), tuple(one.shape))
        for key, one in first.items()
    )
    activation = "" if layer.experts is not None else layer.activation
    at = LayerAt(name, layer.num_experts, activation, tensors)
    return Source(at, lambda expert: list(tensors_of(layer, expert).values()))


def _signature(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{one.dtype} {list(one.shape)}" for name, one in tensors.items()}
