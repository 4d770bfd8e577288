"""What of a model is arithmetic, as a graph that needs nothing of ours: it is given its rows.

Each lookup of a SparseEmbedding is an input in its place, the rows [*keys.shape, dim] of its keys,
or with pooling [*keys.shape[:-1], dim] of its bags.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn

from workers.embedding.sparse import SparseEmbedding
from workers.model.chain.follow import Followed
from workers.model.chain.lookups import embedding_at, source_of, traced_through
from workers.model.code.entry import ModelError
from workers.model.module.inputs import arguments_of


@dataclass(frozen=True, slots=True)
class DenseInput:
    """One input of the graph.

    Attributes:
        name: of it.
        table: whose rows it takes; empty where it is an input of the model.
        keys: that the rows are of, as the model's forward writes them, such as `sparse[:, 0]`; of
            bags `mean(sparse[:, 1:])`, one row a bag.
        dim: values a row; 0 where it is an input of the model.
    """

    name: str
    table: str = ""
    keys: str = ""
    dim: int = 0


@dataclass(frozen=True, slots=True)
class DensePart:
    """The graph, with its inputs in the order of its arguments; it gives what the model gives."""

    module: fx.GraphModule
    inputs: tuple[DenseInput, ...]

    def arguments(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
        """What the graph takes for a batch of the model's inputs."""
        found = iter(rows_of(model, batch))
        return tuple(next(found) if one.table else batch[one.name] for one in self.inputs)


def dense_part(model: nn.Module, inputs: Sequence[str] = ()) -> DensePart:
    """Part a model from its tables; its layers are shared, and are to be in evaluation.

    Args:
        inputs: of the model, for one that is followed and not traced.

    Raises:
        ModelError: its forward cannot be followed.
    """
    if isinstance(model, Followed):
        return _whole(model, inputs)
    graph = traced_through(model, training=False)
    first = next(iter(graph.nodes))
    looked_up: list[DenseInput] = []
    for node in list(graph.nodes):
        if node.op != "call_module":
            continue
        module = model.get_submodule(str(node.target))
        if not isinstance(module, SparseEmbedding):
            continue
        spec, keys = embedding_at(model, str(node.target)).spec, source_of(model, node).text
        with graph.inserting_before(first):
            given = graph.placeholder("rows_" + str(node.target).replace(".", "_"))
        given.target = given.name  # of several lookups each its own
        if module.pooling is not None:
            keys = f"{module.pooling}({keys})"
        looked_up.append(DenseInput(given.name, spec.table, keys, spec.dim))
        node.replace_all_uses_with(given)
        graph.erase_node(node)
    module = fx.GraphModule(model, graph, type(model).__name__)
    graph = module.graph
    graph.eliminate_dead_code()
    rows = {one.name: one for one in looked_up}
    for node in list(graph.nodes):
        if node.op == "placeholder" and not node.users and node.name not in rows:
            graph.erase_node(node)
    named = [node.name for node in graph.nodes if node.op == "placeholder"]
    graph.lint()
    module.recompile()
    return DensePart(module.eval(), tuple(rows.get(name, DenseInput(name)) for name in named))


def _whole(model: Followed, inputs: Sequence[str]) -> DensePart:
    """A model that has no tables, as a graph that calls it."""
    if any(isinstance(module, SparseEmbedding) for module in model.modules()):
        raise ModelError(
            f"{type(model).__name__}: its forward has no graph of operations that lookups could be "
            "inputs of; expected none in it"
        )
    graph = fx.Graph()
    given = {name: graph.placeholder(name) for name in inputs}
    taken = inspect.signature(model.forward).parameters
    graph.output(graph.call_module("model", (), arguments_of(taken, given)))
    module = fx.GraphModule(nn.ModuleDict({"model": model}), graph, type(model).__name__)
    return DensePart(module.eval(), tuple(map(DenseInput, inputs)))


@torch.no_grad()
def rows_of(model: nn.Module, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """The rows that a model looks up for a batch, in the order of its calls."""
    rows: list[Tensor] = []

    def take(_module: nn.Module, _keys: object, found: Tensor) -> None:
        rows.append(found)

    layers = [module for module in model.modules() if isinstance(module, SparseEmbedding)]
    hooks = [layer.register_forward_hook(take) for layer in layers]
    try:
        model(**arguments_of(inspect.signature(model.forward).parameters, batch))
    finally:
        for hook in hooks:
            hook.remove()
    return rows
