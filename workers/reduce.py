"""Dense gradients of a stage's workers, summed in one flat all-reduce a step."""

import datetime
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from protos.security import is_loopback
from workers.layers.reduction import reduced_over

_TIMEOUT = datetime.timedelta(seconds=300)


class Rendezvous:
    """The store through which the workers of one stage find each other; rank 0 hosts it."""

    def __init__(self, host: str) -> None:
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            host, 0, is_master=True, wait_for_workers=False
        )
        self.address = f"{host}:{self.store.port}"


class StageGroup:
    """The workers of one stage; with one worker every call is free.

    Args:
        rendezvous: host:port of rank 0's store.
        own: rank 0's own store.
    """

    def __init__(
        self, rank: int, size: int, rendezvous: str, own: Rendezvous | None, device: torch.device
    ) -> None:
        self.rank = rank
        self.size = size
        self._flat: Tensor | None = None
        if size == 1:
            return
        host, _, port = rendezvous.rpartition(":")
        if is_loopback(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        store = (
            own.store if own else dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
        )
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=PrefixStore("stage", store),
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
        )

    def sum_gradients(
        self, parameters: Sequence[Tensor], loss: float, loads: Sequence[Tensor] = ()
    ) -> float:
        """Sum gradients, loss and `loads` over the workers; the summed loss.

        Parameters that a tag calls experts are left out: one worker has their whole gradient.
        """
        if self.size == 1:
            return loss
        for load in loads:
            dist.all_reduce(load)
        parameters = _replicas(parameters)
        count = sum(p.numel() for p in parameters)
        device = parameters[0].device if parameters else torch.device("cpu")
        if self._flat is None:
            self._flat = torch.empty(count + 1, device=device)
        flat, offset = self._flat, 0
        for p in parameters:
            part = flat[offset : offset + p.numel()]
            part.zero_() if p.grad is None else part.copy_(p.grad.view(-1))
            offset += p.numel()
        flat[count] = loss
        dist.all_reduce(flat)
        offset = 0
        for p in parameters:
            part = flat[offset : offset + p.numel()].view_as(p)
            if p.grad is None:
                p.grad = part.clone()
            else:
                p.grad.copy_(part)
            offset += p.numel()
        return float(flat[count])

    def share_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Give every worker rank 0's initial values."""
        if self.size > 1:
            for p in _replicas(parameters):
                dist.broadcast(p.data, src=0)

    def barrier(self) -> None:
        """Wait for all workers of the stage."""
        if self.size > 1:
            dist.barrier()

    def gather(self, values: Tensor) -> Tensor:
        """All workers' values [n, ...] one after the other, on every worker."""
        if self.size == 1:
            return values
        sizes = [values.new_zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(sizes, values.new_tensor([len(values)], dtype=torch.int64))
        longest = int(max(sizes))
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(values)] = values
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        return torch.cat([p[: int(n)] for p, n in zip(parts, sizes, strict=True)])

    def close(self) -> None:
        """Leave the group."""
        if self.size > 1:
            dist.destroy_process_group()


def _replicas(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in parameters if reduced_over(p) == "replica"]
