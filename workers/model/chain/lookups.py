"""Which keys each SparseEmbedding of a model looks up: model inputs, or what is selected of them.

Rows are pulled before a stage runs, so keys must follow from the model's inputs without running a
layer. The forward of whatever holds a SparseEmbedding is traced through, child by child.
"""

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from workers.embedding.sparse import SparseEmbedding, tables_of
from workers.model.chain.tracer import Tracer
from workers.model.code.entry import ModelError
from workers.model.module.inputs import unpacked
from workers.model.module.modes import in_mode

# What picks or rearranges keys without making new ones.
_METHODS = frozenset(
    (
        *("chunk", "contiguous", "flatten", "movedim", "narrow", "permute", "ravel", "reshape"),
        *("select", "split", "squeeze", "swapaxes", "t", "transpose", "unbind", "unflatten"),
        *("unsqueeze", "view"),
    )
)
_FUNCTIONS: frozenset[Callable[..., Any]] = frozenset(
    (operator.getitem, *(getattr(torch, name) for name in _METHODS if hasattr(torch, name)))
)

Sources = tuple["KeySource", ...]  # of a table's keys, in the order in which forward looks them up


@dataclass(frozen=True, slots=True)
class KeySource:
    """Keys as a model input, or as what a chain of selections takes of it.

    Attributes:
        input: name of the model input.
        text: how the forward writes it; equal texts are equal keys.
    """

    input: str
    text: str
    _steps: tuple[Callable[[Any], Any], ...] = field(default=(), compare=False)

    def of(self, values: Mapping[str, Tensor]) -> Tensor:
        """The keys [n] int64 of a batch, values being the model's inputs by name."""
        keys: Any = values[self.input]
        for step in self._steps:
            keys = step(keys)
        flat: Tensor = keys.reshape(-1)
        return flat


@dataclass(frozen=True, slots=True)
class Lookup:
    """One call of a SparseEmbedding, by its dotted name in the model."""

    embedding: str
    keys: KeySource


def find_lookups(model: nn.Module, graph: fx.Graph, training: bool) -> tuple[Lookup, ...]:
    """The lookups of a model in the order of its forward.

    Args:
        graph: of the model, its called modules left whole.
        training: which mode to trace the forward of children in.

    Raises:
        ModelError: the keys of one are made by the model, or the forward of a child that holds
            one cannot be traced; says what to change.
    """
    called = [model.get_submodule(str(n.target)) for n in graph.nodes if n.op == "call_module"]
    if any(_holds_embedding(module) for module in called):
        graph = traced_through(model, training)
    return tuple(
        Lookup(str(node.target), source_of(model, node))
        for node in graph.nodes
        if node.op == "call_module"
        and isinstance(model.get_submodule(str(node.target)), SparseEmbedding)
    )


def sources_by_table(module: nn.Module, lookups: Iterable[Lookup]) -> dict[str, Sources]:
    """Where the keys of each table come from."""
    sources: dict[str, Sources] = {}
    for lookup in lookups:
        table = embedding_at(module, lookup.embedding).spec.table
        sources[table] = (*sources.get(table, ()), lookup.keys)
    return sources


def keys_of(sources: Sequence[KeySource], values: Mapping[str, Tensor]) -> Tensor:
    """All keys [n] int64 of a table in a batch, in the order of its lookups, contiguous."""
    parts = [source.of(values) for source in sources]
    return (parts[0] if len(parts) == 1 else torch.cat(parts)).contiguous()


def embedding_at(module: nn.Module, name: str) -> SparseEmbedding:
    """The SparseEmbedding of that dotted name."""
    found = module.get_submodule(name)
    assert isinstance(found, SparseEmbedding)
    return found


def check_tables(model: nn.Module) -> None:
    """Refuse a table that is described in two ways.

    Raises:
        ModelError: names it.
    """
    try:
        tables_of(m for m in model.modules() if isinstance(m, SparseEmbedding))
    except ValueError as error:
        raise ModelError(f"{type(model).__name__}: {error}; expected one description") from None


def _holds_embedding(module: nn.Module) -> bool:
    """Whether a SparseEmbedding is in there that is not the module itself."""
    return any(isinstance(m, SparseEmbedding) for m in module.modules() if m is not module)


class _ThroughChildren(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not _holds_embedding(m)


def traced_through(model: nn.Module, training: bool) -> fx.Graph:
    """The graph of a forward in which SparseEmbeddings are called, however deep they lie.

    Raises:
        ModelError: the forward of a child that holds one cannot be traced.
    """
    try:
        with in_mode(model, training):
            return unpacked(model, _ThroughChildren().trace(model))
    except Exception as error:
        holders = [name for name, child in model.named_children() if _holds_embedding(child)]
        raise ModelError(
            f"{type(model).__name__}: {', '.join(map(repr, holders))} holds a SparseEmbedding, "
            "whose keys cannot be followed through its forward: "
            f"{type(error).__name__}: {error}; call the embedding in the model's own forward, and "
            "pass on what it gives:\n"
            "    def forward(self, sparse, dense):\n"
            "        return self.tower(self.embedding(sparse), dense)"
        ) from error


def source_of(model: nn.Module, call: fx.Node) -> KeySource:
    """Follow the keys of a SparseEmbedding's call back to a model input.

    Raises:
        ModelError: they are made by the model.
    """
    arguments = (*call.args, *call.kwargs.values())
    node = arguments[0] if arguments else None
    steps: list[Callable[[Any], Any]] = []
    shown: list[str] = []
    while isinstance(node, fx.Node) and node.op != "placeholder":
        step = _selection(node)
        if step is None:
            break
        steps.insert(0, step)
        shown.insert(0, _shown(node))
        node = node.args[0]
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        name = str(call.target)
        raise ModelError(
            f"{type(model).__name__}: {name!r} must be given a model input as it is, or a "
            "selection of it, so that its rows can be pulled before the step, such as\n"
            f"    self.{name}(sparse)\n    self.{name}(sparse[:, 2:5])\n"
            "Keys that are computed belong into the data, where data.sparse has crosses, too"
        )
    return KeySource(node.name, node.name + "".join(shown), tuple(steps))


def _selection(node: fx.Node) -> Callable[[Any], Any] | None:
    """What a node does to its first argument, if that only selects by constants."""
    if len(node.all_input_nodes) != 1 or not isinstance(node.args[0], fx.Node):
        return None
    if node.args[0] is not node.all_input_nodes[0]:
        return None
    rest, named = node.args[1:], dict(node.kwargs)
    if node.op == "call_method" and node.target in _METHODS:
        name = str(node.target)
        return lambda value: getattr(value, name)(*rest, **named)
    if node.op == "call_function" and node.target in _FUNCTIONS:
        function: Callable[..., Any] = node.target
        return lambda value: function(value, *rest, **named)
    return None


def _shown(node: fx.Node) -> str:
    """A selection as text that two equal ones share."""
    rest = [repr(argument) for argument in node.args[1:]]
    rest += [f"{key}={value!r}" for key, value in sorted(node.kwargs.items())]
    if node.target is operator.getitem:
        return f"[{', '.join(rest)}]"
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    return f".{name}({', '.join(rest)})"
