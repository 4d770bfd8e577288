"""What a model's forward takes: tensors by name, or one batch that it reads them from."""

import operator
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor, fx, nn

from protos.job_pb2 import DataSpec
from workers.data.columns.named import named_of
from workers.data.tensors import wide
from workers.model.code.entry import ModelError

ALWAYS: Final[Mapping[str, Tensor]] = {
    "sparse": torch.zeros((0, 0), dtype=torch.int64),
    "dense": torch.zeros((0, 0)),
    "tokens": torch.zeros((0, 0), dtype=torch.int64),
}
BATCH: Final = "batch"  # a forward's only argument that is all of them


def inputs_of(spec: DataSpec) -> dict[str, Tensor]:
    """A job's inputs by name, of no samples; those that are no columns have no width."""
    return {**ALWAYS, **{one.name: wide(one.nothing) for one in named_of(spec)}}


def arguments_of(names: Mapping[str, Any], batch: Mapping[str, Any]) -> dict[str, Any]:
    """What to call a model with.

    Args:
        names: of the parameters of its forward.
        batch: its inputs by name; what losses read is left out.
    """
    given = {name: tensor for name, tensor in batch.items() if "." not in name}
    return {name: given if name == BATCH else given[name] for name in names}


def unpacked(model: nn.Module, graph: fx.Graph) -> fx.Graph:
    """A traced forward with an input for each tensor that it reads from its batch.

    Raises:
        ModelError: it does something else with the batch.
    """
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    if [str(node.target) for node in placeholders] != [BATCH]:
        return graph
    (batch,) = placeholders
    for user in batch.users:
        if user.target is not operator.getitem or not isinstance(user.args[1], str):
            raise ModelError(
                f"{type(model).__name__}: forward does more with its batch, at {user.name!r}, than "
                "to read tensors from it; expected batch['name'], and these passed to layers"
            )
    # Inputs come first in a graph of their own, so that layers of the same name give way.
    made = fx.Graph()
    by_name = {str(user.args[1]): None for user in batch.users}
    inputs = {name: made.placeholder(name) for name in by_name}
    copies: dict[fx.Node, fx.Node] = {user: inputs[str(user.args[1])] for user in batch.users}
    for node in graph.nodes:
        if node.op == "output":
            made.output(fx.map_arg(node.args[0], lambda n: copies[n]))
        elif node is not batch and node not in copies:
            copies[node] = made.node_copy(node, lambda n: copies[n])
    return made
