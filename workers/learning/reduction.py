"""Over which processes a parameter's gradient is summed, said by a tag on the parameter.

FastMoE's idea (arXiv 2103.13262): what every process holds alike is summed over all of them
("replica", also where there is no tag); what one process of an expert-parallel group holds for all
of them ("expert") has its whole gradient already, and is summed only with its copies elsewhere.
"""

from collections.abc import Iterable
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workers.errors import peers_needed

Over = Literal["replica", "expert"]
_TAG = "heterps_reduce"


def tag(parameters: Iterable[Tensor], over: Over) -> None:
    """Says how the gradients of these parameters are summed."""
    for parameter in parameters:
        setattr(parameter, _TAG, over)


def reduced_over(parameter: Tensor) -> Over:
    """The tag of a parameter."""
    over: Over = getattr(parameter, _TAG, "replica")
    return over


def reduce_gradients(
    module: nn.Module,
    group: dist.ProcessGroup | None = None,
    expert_replicas: dist.ProcessGroup | None = None,
) -> None:
    """Sums the gradients of a module over processes, each by its tag; call it after backward.

    Sums, not means: divide each process's loss by what belongs to all. A gradient that is None
    counts as zero, and no process may leave a call out.

    Args:
        module: the same on all processes but for its experts.
        group: the processes with the same replicas; None: all.
        expert_replicas: the processes with the same experts; None: there are no copies.
    """
    by_tag: dict[Over, list[nn.Parameter]] = {"replica": [], "expert": []}
    for parameter in module.parameters():
        if parameter.requires_grad:
            by_tag[reduced_over(parameter)].append(parameter)
    _sum(by_tag["replica"], group)
    if expert_replicas is not None:
        _sum(by_tag["expert"], expert_replicas)


def _sum(parameters: list[nn.Parameter], group: dist.ProcessGroup | None) -> None:
    by_kind: dict[tuple[torch.dtype, torch.device], list[nn.Parameter]] = {}
    for parameter in parameters:
        by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for some in by_kind.values():  # one message for each
        for parameter in some:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        flat = torch.cat([p.grad.reshape(-1) for p in some if p.grad is not None])
        with peers_needed():
            dist.all_reduce(flat, group=group)
        for parameter, part in zip(some, flat.split([p.numel() for p in some]), strict=True):
            assert parameter.grad is not None
            parameter.grad.copy_(part.view_as(parameter))
