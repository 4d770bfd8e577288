"""What a forward does between its layers, held against its graph before anything is trained.

Tracing runs the model's own forward once. What that does in Python without asking a tensor, such
as `torch.no_grad()` or a count of its calls, is in no graph: it would be lost, or stay for ever as
it was then.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from protos.job_pb2 import JobSpec
from workers.model.chain.follow import Followed
from workers.model.chain.trace import TracedModel
from workers.model.checks.followed import check_followed
from workers.model.checks.trial import first_parts, given_to, joined
from workers.model.code.entry import ModelError
from workers.model.module.inputs import arguments_of
from workers.model.module.randomness import Draws
from workers.model.module.tried import tried

_SEED = 1
_NOISE = 0.1  # in what layers give: that of a new model may be zeros
_TOLERANCE = 1e-4  # of the largest value
_log = logging.getLogger("heterps.stage")


@dataclass(slots=True)
class _Call:
    """A call of a layer.

    Attributes:
        layer: its name.
        modes: of autograd and autocast that it was called in.
        given: the tensors that it was called with.
        leaves: what it gave, each a leaf of autograd in place of what was computed.
        felt: the gradients of these.
    """

    layer: str
    modes: tuple[bool, bool]
    given: list[Tensor]
    leaves: list[Tensor] = field(default_factory=list)
    felt: list[Tensor] = field(default_factory=list)


def check_graph(traced: TracedModel, job: JobSpec) -> None:
    """Refuse a model whose graph is not its own forward, as far as a few samples of the job tell.

    Layers have part in it by what they are called with; nothing is computed back through one.

    Raises:
        ModelError: what its stages would do otherwise, at which layer, and the remedy.
        DataError: the first samples of the job do not fit it.
    """
    if isinstance(traced.model, Followed):
        check_followed(traced, job)
        return
    parts = first_parts(job)
    if not parts:
        return
    batch = joined(*parts[:2])
    names = inspect.signature(traced.model.forward).parameters
    graph = fx.Interpreter(traced.model, graph=traced.graph)
    try:
        own = _seen(traced, lambda: traced.model(**arguments_of(names, batch)))
        staged = _seen(traced, lambda: graph.run(*given_to(traced, batch)))
    except Exception as error:
        _log.info("the model could not be tried: %s: %s", type(error).__name__, error)
        return
    if told := _difference(own, staged):
        raise ModelError(
            f"{type(traced.model).__name__}: {told}; forward is traced once, and of what it does "
            "between layers only operations of tensors are done in training: expected "
            "torch.no_grad(), torch.autocast() and what is counted or kept over calls in a child "
            "module; x.detach() for what is not to learn; no hooks on the model itself"
        )


def _seen(traced: TracedModel, forward: Callable[[], Any]) -> list[_Call]:
    """What a forward does the second time: what it counts is another number then.

    What it returns comes last, as what a layer without a name is given.
    """
    with tried(traced.model), torch.enable_grad():
        draws = Draws.now()
        for _ in range(2):
            try:
                with _watched(traced) as calls:
                    result = _tensors(forward())
            finally:
                draws.again()
    calls.append(_Call("", (True, False), result))
    weighed = [
        (end * torch.linspace(-1, 1, end.numel()).view(end.shape)).sum()
        for call in calls
        for end in call.given
        if end.requires_grad
    ]
    leaves = [leaf for call in calls for leaf in call.leaves]
    if weighed and leaves:
        found = torch.autograd.grad(sum(weighed[1:], weighed[0]), leaves, allow_unused=True)
        felt = iter(torch.zeros(()) if gradient is None else gradient for gradient in found)
        for call in calls:
            call.felt = [next(felt) for _ in call.leaves]
    return calls


@contextmanager
def _watched(traced: TracedModel) -> Iterator[list[_Call]]:
    """The calls of layers until it ends."""
    names = {
        id(traced.model.get_submodule(str(node.target))): str(node.target)
        for node in traced.graph.nodes
        if node.op == "call_module"
    }
    calls: list[_Call] = []
    generator = torch.Generator().manual_seed(_SEED)
    before = nn.Module.__call__

    def stand_in(call: _Call, value: Any) -> Any:
        """A leaf for a tensor that may learn; as what may be changed in place."""
        if not (isinstance(value, Tensor) and value.is_floating_point()):
            return value
        noise = torch.rand(value.shape, generator=generator).to(value)
        leaf = (value.detach() + _NOISE * noise).requires_grad_()
        call.leaves.append(leaf)
        return leaf.clone()

    def called(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if id(module) not in names:
            return before(module, *args, **kwargs)
        modes = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        given = [value.clone() for value in _tensors((args, kwargs))]
        calls.append(call := _Call(names[id(module)], modes, given))
        return tree_map(lambda v: stand_in(call, v), before(module, *args, **kwargs))

    nn.Module.__call__ = called  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        nn.Module.__call__ = before  # type: ignore[method-assign]


def _tensors(values: Any) -> list[Tensor]:
    return [value for value in tree_leaves(values) if isinstance(value, Tensor)]


def _difference(own: list[_Call], staged: list[_Call]) -> str:
    """In words; empty: there is none."""
    if [call.layer for call in own] != [call.layer for call in staged]:
        return "its forward calls other layers than when it was traced"
    for one, other in zip(own, staged, strict=True):
        if one.modes != other.modes:
            return f"its forward calls {one.layer!r} under torch.no_grad() or torch.autocast()"
        if not _alike(one.given, other.given):
            does = f"gives {one.layer!r}" if one.layer else "returns"
            return f"its forward {does} something else than its stages would"
    for one, other in zip(own, staged, strict=True):
        if not _alike(one.felt, other.felt):
            return f"its forward has {one.layer!r} learn otherwise than its stages would"
    return ""


def _alike(some: list[Tensor], others: list[Tensor]) -> bool:
    if [one.shape for one in some] != [one.shape for one in others]:
        return False
    for one, other in zip(some, others, strict=True):
        here, there = one.detach().double(), other.detach().double()
        size = float(here.abs().nan_to_num().max()) if here.numel() else 0.0
        if not torch.allclose(here, there, rtol=0, atol=_TOLERANCE * size, equal_nan=True):
            return False
    return True
