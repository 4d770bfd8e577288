"""Running a model layer by layer on a few samples of a job, so that no mark is left on it.

Layers run one after the other on the host, each with parameters of its own for the time being:
those of a new model may hide what it does, as a last layer of zeros would.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves, tree_map

from protos.job_pb2 import JobSpec
from workers.data.reader import Dataset
from workers.data.tensors import first_samples, tensors_of
from workers.device.mapped import empty_like
from workers.model.chain.trace import TracedModel
from workers.model.module.places import parameter_places
from workers.model.module.tried import tried

_PART = 8  # samples
_SEED = 1
_NOISE = 0.1  # of a parameter's mean size
_SMALLEST = 0.1  # size that noise is taken of


def first_parts(job: JobSpec) -> Sequence[Mapping[str, Tensor]]:
    """Three batches of as many samples, different ones as far as there are; none without data."""
    dataset = Dataset.of(job, "train")
    found = first_samples(dataset, 3 * _PART)
    if not len(found):
        return ()
    size = max(1, min(_PART, len(found) // 3))
    rows = [np.arange(part * size, (part + 1) * size) % len(found) for part in range(3)]
    return [tensors_of(found.take(some)) for some in rows]


def joined(*parts: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All samples of some batches."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}


def given_to(traced: TracedModel, batch: Mapping[str, Tensor]) -> list[Tensor]:
    """What a model's graph takes of a batch, in order."""
    return [batch[str(n.target)] for n in traced.graph.nodes if n.op == "placeholder"]


def run(traced: TracedModel, batch: Mapping[str, Tensor]) -> Any:
    """What a model gives for a batch, with other parameters than its own; leaves no mark on it."""
    with tried(traced.model), torch.no_grad():
        return Layers(traced, varied=True).run(*given_to(traced, batch))


class Layers(fx.Interpreter):
    """Runs a model layer by layer.

    Args:
        varied: whether layers have other parameters than their own; in each run the same.
    """

    def __init__(self, traced: TracedModel, *, varied: bool) -> None:
        super().__init__(traced.model, graph=traced.graph)
        self.varied = varied
        self._calls = 0

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a layer on its own."""
        with self.next_others(module := self.fetch_attr(target)) as others:
            result = self.call_layer(str(target), module, detached(args), detached(kwargs), others)
        return detached(result)

    @contextmanager
    def next_others(self, module: nn.Module) -> Iterator[Mapping[Tensor, Tensor]]:
        """As `others`, of the next call."""
        number, self._calls = self._calls, self._calls + 1
        with self.others(number, module) as others:
            yield others

    @contextmanager
    def others(self, number: int, module: nn.Module) -> Iterator[Mapping[Tensor, Tensor]]:
        """Have the parameters in place that a call's layer is run with; of each its own."""
        if not self.varied:
            yield {}
            return
        with varied(module, torch.Generator().manual_seed(_SEED + number)) as others:
            yield others

    def call_layer(
        self,
        layer: str,
        module: nn.Module,
        args: Any,
        kwargs: Any,
        others: Mapping[Tensor, Tensor],
    ) -> Any:
        """What a layer gives; `others` are the parameters in place, of each its own."""
        return module(*args, **kwargs)


@contextmanager
def varied(module: nn.Module, generator: torch.Generator) -> Iterator[dict[Tensor, Tensor]]:
    """Have other parameters in a module in place of those that are trained; these, of each."""
    places = parameter_places(module, besides=True)
    others = {parameter: _varied_from(parameter, generator) for parameter in places}
    try:
        for parameter, where in places.items():
            for place in where:
                place.put(others[parameter])
        yield {other: parameter for parameter, other in others.items()}
    finally:
        for parameter, where in places.items():
            for place in where:
                place.put(parameter)


def _varied_from(parameter: Tensor, generator: torch.Generator) -> nn.Parameter:
    values = parameter.detach()
    mean = float(torch.linalg.vector_norm(values, 1)) / max(1, values.numel())
    other = empty_like(values)  # experts out of memory have others there, too
    other.uniform_(-1.0, 1.0, generator=generator).mul_(_NOISE * max(mean, _SMALLEST))
    return nn.Parameter(other.add_(values))


def mark(tensor: Tensor) -> tuple[int, str]:
    """Differs where a tensor was changed; what is changed by its `data` counts no version."""
    values = tensor.detach()
    if values.layout != torch.strided or values.is_nested or values.is_quantized:
        return tensor._version, ""
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    return tensor._version, str(float(values.sum(dtype=torch.float64)))


def detached(values: Any) -> Any:
    """The same tensors without their graph."""
    return tree_map(lambda v: v.detach() if isinstance(v, Tensor) else v, values)


def leaves(result: Any) -> list[Tensor]:
    """The tensors that autograd would give gradients for."""
    values = [v for v in tree_leaves(result) if isinstance(v, Tensor)]
    found = {id(v): v for v in values if v.requires_grad and v.grad_fn is None}
    waiting: list[Any] = [v.grad_fn for v in values]
    seen: set[Any] = set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if isinstance(variable, Tensor):
            found[id(variable)] = variable
        waiting.extend(following for following, _ in node.next_functions)
    return list(found.values())
