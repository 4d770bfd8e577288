"""A run of a model's layers as a module: what a stage computes, and what it takes and gives."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, fx, nn

from workers.model.chain.lookups import Lookup
from workers.model.code.entry import ModelError

OWN = "own"  # of a stage's graph, what it shares with the model
RETURNED = "expected a tensor, such as the prediction [B], or a dict of tensors by name"


@dataclass(frozen=True, slots=True)
class StageGraph:
    """A run of layers as a module of its own.

    `module(*[values[n] for n in inputs])` returns a tuple in the order of `outputs`; in the
    last stage, which is `final`, that is the model's result alone: one tensor, where `named`
    several by the names that the model gives them, or a dict of several that its last layer gives.
    `lookups` are those of its SparseEmbeddings, in the order of their calls; their keys are
    selected of `inputs`. `uncalled` is state of the model that no layer has: the first stage's.
    """

    module: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    lookups: tuple[Lookup, ...]
    uncalled: Mapping[str, Tensor]
    final: bool = False
    named: bool = False

    def by_name(self, results: Sequence[Any]) -> dict[str, Any]:
        """What the module returned, by `outputs`, or by the names that the last layer gives.

        Raises:
            ModelError: that layer gives neither a tensor nor a dict of tensors.
        """
        if self.final and not self.named:
            (given,) = results
            if isinstance(given, Mapping) and given and all(map(_is_named, given.items())):
                return _Returned(given)
            if not isinstance(given, Tensor):
                raise ModelError(
                    f"forward returns what {self.outputs[0]!r} gives, a {type(given).__name__}; "
                    f"{RETURNED}"
                )
        return dict(zip(self.outputs, results, strict=True))

    def result(self, outputs: Mapping[str, Tensor]) -> Tensor | Mapping[str, Tensor]:
        """What the model gives, of the last stage's outputs `by_name`."""
        named = self.named or isinstance(outputs, _Returned)
        return outputs if named else next(iter(outputs.values()))


class _Returned(dict[str, Any]):
    """A model's result, a dict that its last layer gives whole."""


def _is_named(item: tuple[object, object]) -> bool:
    name, value = item
    return isinstance(name, str) and isinstance(value, Tensor)


class StageModule(nn.Module):
    """A run of layers under the names that they have in the model.

    The graph runs beside it, since a GraphModule has attributes, such as `code`, that layers may be
    called by.

    Args:
        graph: whose submodule `OWN` has the layers.
        others: modules of it that are in the other mode when the model is in training, or not.
    """

    def __init__(self, graph: fx.GraphModule, others: Mapping[bool, Sequence[nn.Module]]) -> None:
        super().__init__()
        for name, child in graph.get_submodule(OWN).named_children():
            self.add_module(name, child)
        self.__dict__["_graph"] = graph
        self.__dict__["_others"] = others

    def train(self, mode: bool = True) -> "StageModule":
        """Have each module in the mode that the model's own `train` would."""
        super().train(mode)
        for module in self.__dict__["_others"][mode]:
            module.training = not mode
        return self

    def forward(self, *inputs: Tensor) -> object:
        """The stage's outputs."""
        graph: fx.GraphModule = self.__dict__["_graph"]
        return graph(*inputs)
