"""The processes that share out the experts of a layer: their ranks, hosts and measured rates."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from workers.errors import peers_needed

_EXCHANGED_BYTES = 1 << 20  # to and from each process, to measure the bandwidth
_MATMUL = 512  # side of the matrices by which arithmetic is measured
_REPEATS = 3


@dataclass(frozen=True, slots=True)
class Rates:
    """What a process of the group computes and exchanges a second.

    flops_per_s: of matrix products in the layer's dtype.
    bytes_per_s: that a process sends while it receives as many.
    """

    flops_per_s: float
    bytes_per_s: float


@dataclass(slots=True)
class ExpertGroup:
    """The processes over which experts are split, `first(r)` to `first(r + 1)` on rank r.

    With `local` and `across` rows travel in two steps, inside the host to the process whose rank in
    its host is that of the receiver, then between hosts among processes of equal rank: messages
    between hosts are fewer and larger (SE-MoE, arXiv 2205.10034). Ranks of one host follow one
    another, as many on each.

    Args:
        processes: the process group; None: all processes.
        rates: for the decision on shadowing; measured when first needed unless given.
        local: those of `processes` on this host.
        across: those of equal rank on each host.

    Raises:
        ValueError: `local` and `across` do not make up `processes`.
    """

    processes: dist.ProcessGroup | None = None
    rates: Rates | None = None
    local: dist.ProcessGroup | None = None
    across: dist.ProcessGroup | None = None
    rank: int = field(init=False)
    size: int = field(init=False)

    def __post_init__(self) -> None:
        self.rank, self.size = dist.get_rank(self.processes), dist.get_world_size(self.processes)
        if self.local is None and self.across is None:
            return
        hosts = dist.get_world_size(self.across) if self.across else 0
        if self.local is None or hosts * dist.get_world_size(self.local) != self.size:
            raise ValueError(
                "ExpertGroup: local, across: expected groups whose sizes multiply to "
                f"{self.size} (processes)"
            )

    @classmethod
    def of_hosts(cls, per_host: int, size: int | None = None) -> "ExpertGroup":
        """The group of this process where each `size` that follow one another are one.

        All processes there are call it, since all take part in making process groups.

        Args:
            per_host: processes of each host.
            size: processes of each group, over whole hosts; None: all there are.

        Raises:
            ValueError: `size` does not divide the processes, or `per_host` the size.
        """
        world, rank = dist.get_world_size(), dist.get_rank()
        size = world if size is None else size
        if not 0 < size <= world or world % size or not 0 < per_host <= size or size % per_host:
            raise ValueError(
                "ExpertGroup: per_host, size: expected a divisor of size, and size one of "
                f"{world} (processes), got {per_host} and {size}"
            )
        made: list[dist.ProcessGroup] = []
        for first in range(0, world, size):
            everyone = range(first, first + size)
            locals_ = [everyone[i : i + per_host] for i in range(0, size, per_host)]
            for ranks in (everyone, *locals_, *(everyone[i::per_host] for i in range(per_host))):
                with peers_needed():
                    group = dist.new_group(list(ranks))
                if rank in ranks:
                    made.append(group)
        processes, local, across = made
        return cls(processes, local=local, across=across)

    @property
    def per_host(self) -> int | None:
        """Processes of each host; None where rows travel in one step."""
        return dist.get_world_size(self.local) if self.local else None

    def first(self, rank: int, experts: int) -> int:
        """The first expert of a rank; the last rank's end for rank = size."""
        return rank * experts // self.size

    def bounds(self, experts: int) -> list[int]:
        """The first expert of each rank, then the number of experts."""
        return [self.first(rank, experts) for rank in range(self.size + 1)]

    def __deepcopy__(self, memo: Any) -> "ExpertGroup":
        # Process groups cannot be copied.
        return self

    @peers_needed()
    def total(self, values: Tensor) -> Tensor:
        """The sum over all processes, on each."""
        total = values.clone()
        dist.all_reduce(total, group=self.processes)
        return total

    @peers_needed()
    def broadcast(self, tensor: Tensor, rank: int) -> None:
        """Gives every process the values of one."""
        dist.broadcast(tensor, group_src=rank, group=self.processes)

    @peers_needed()
    def sum_to(self, tensor: Tensor, rank: int) -> None:
        """Sums over all processes into the tensor of one; those of others are then undefined."""
        dist.reduce(tensor, group_dst=rank, group=self.processes)

    @peers_needed()
    def gather(self, values: Tensor) -> Tensor:
        """[n] of every process to [size, n]."""
        everyone = values.new_empty((self.size, *values.shape))
        dist.all_gather(list(everyone.unbind()), values, group=self.processes)
        return everyone

    @peers_needed()
    def measured(self, like: Tensor) -> Rates:
        """The rates, measured at the first call, which all processes must make.

        All get the same figures, those of the slowest: they decide by them, and alike.

        Args:
            like: a tensor of the layer's dtype and device.
        """
        if self.rates is None:
            rates = torch.tensor([_flops_per_s(like), self._bytes_per_s(like)], dtype=torch.float64)
            rates = rates.to(like.device)
            dist.all_reduce(rates, dist.ReduceOp.MIN, group=self.processes)
            self.rates = Rates(*rates.tolist())
        return self.rates

    def _bytes_per_s(self, like: Tensor) -> float:
        if self.size == 1:
            return float("inf")
        sent = torch.zeros((self.size, _EXCHANGED_BYTES // 4), device=like.device)
        received, best = torch.empty_like(sent), float("inf")
        for _ in range(_REPEATS):
            dist.barrier(self.processes)
            best = min(best, _seconds(lambda: self._exchange(received, sent), like))
        return _EXCHANGED_BYTES * (self.size - 1) / best

    def _exchange(self, received: Tensor, sent: Tensor) -> None:
        dist.all_to_all_single(received, sent, group=self.processes)


def _flops_per_s(like: Tensor) -> float:
    a = torch.zeros((_MATMUL, _MATMUL), dtype=like.dtype, device=like.device)
    best = min(_seconds(lambda: a @ a, like) for _ in range(_REPEATS))
    return 2 * _MATMUL**3 / best


def _seconds(work: Callable[[], object], like: Tensor) -> float:
    _wait_for(like)
    begin = time.perf_counter()
    work()
    _wait_for(like)
    return time.perf_counter() - begin


def _wait_for(like: Tensor) -> None:
    if like.is_cuda:
        torch.cuda.synchronize(like.device)
