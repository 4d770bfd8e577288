"""A model that was followed, held against its own forward before anything is trained.

What a forward does depending on values, without gradients, or otherwise for one sample, is in no
graph.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_leaves

from protos.job_pb2 import JobSpec
from workers.model.chain.follow import Followed
from workers.model.chain.trace import TracedModel
from workers.model.checks.trial import first_parts, joined, varied
from workers.model.code.entry import ModelError
from workers.model.module.inputs import arguments_of
from workers.model.module.modes import in_mode

_SEED = 1
_LEAST = 0.01  # of the largest one: gradients that should be 0 are what rounding leaves
_TOLERANCE = 1e-3  # of the largest value: kernels that know of no padding round otherwise


def check_followed(traced: TracedModel, job: JobSpec) -> None:
    """Refuse a model whose graph gives other outputs or gradients than its own forward.

    Both compute a few samples of the job and the first one alone, with other weights than their
    own, since those of a new model may hide what it does. Other models are not looked at.

    Raises:
        ModelError: they differ, and by how much.
        DataError: the first samples of the job do not fit it.
    """
    parts = first_parts(job) if isinstance(traced.model, Followed) else ()
    if not parts:
        return
    batch = joined(*parts)
    for some in (batch, {name: tensor[:1] for name, tensor in batch.items()}):
        own, graph = _both(traced, some)
        largest = max((float(one.abs().max()) for one in own if one.numel()), default=0.0)
        for mine, followed in zip(own, graph, strict=True):
            difference = float((mine - followed).abs().max()) if mine.numel() else 0.0
            size = float(mine.abs().max()) if mine.numel() else 0.0
            if not difference <= _TOLERANCE * max(size, _LEAST * largest):
                raise ModelError(
                    f"{type(traced.model).__name__}: of {len(next(iter(some.values())))} samples "
                    f"its stages would give outputs or gradients that differ by {difference:g} "
                    "from those of its own forward; expected a forward that does the same between "
                    "its blocks whatever the values are, and nothing there under torch.no_grad()"
                )


def _both(
    traced: TracedModel, batch: Mapping[str, Tensor]
) -> tuple[Sequence[Tensor], Sequence[Tensor]]:
    """Outputs and gradients of the model's own forward, and of its graph."""
    model = traced.model
    names = inspect.signature(model.forward).parameters
    given = [batch[str(n.target)] for n in traced.graph.nodes if n.op == "placeholder"]
    generator = torch.Generator().manual_seed(_SEED)
    with in_mode(model, training=False), torch.enable_grad(), varied(model, generator) as others:
        parameters = list(others)
        graph = fx.Interpreter(model, graph=traced.graph)
        return (
            _felt(model(**arguments_of(names, batch)), parameters),
            _felt(graph.run(*given), parameters),
        )


def _felt(result: Any, parameters: Sequence[Tensor]) -> list[Tensor]:
    """Outputs, and the gradients of a sum that weighs each of their values otherwise."""
    outputs: list[Tensor] = tree_leaves(result)
    sums = [
        (output * torch.linspace(-1, 1, output.numel()).view_as(output)).sum()
        for output in outputs
        if output.requires_grad
    ]
    if not sums or not parameters:
        return [output.detach() for output in outputs]
    gradients = torch.autograd.grad(sum(sums[1:], sums[0]), parameters, allow_unused=True)
    felt = [torch.zeros(()) if gradient is None else gradient for gradient in gradients]
    return [*(output.detach() for output in outputs), *felt]
