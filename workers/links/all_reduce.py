"""Dense gradients of a stage's workers, summed in one flat all-reduce a step.

Workers on one host use gloo or NCCL over its loopback. Those on several hosts combine over gRPC
(`workers/links/combine.py`), unless HETERPS_PLAIN_COLLECTIVES=1 on every node lets gloo and NCCL,
which encrypt nothing and ask nobody who they are, cross the network.
"""

import datetime
import os
import socket
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from chassis.security import SecurityError, is_loopback
from workers.errors import peers_needed
from workers.learning.reduction import reduced_over
from workers.links.combine import Combiner

PLAIN = "HETERPS_PLAIN_COLLECTIVES"
_LOOPBACK = "127.0.0.1"
_TIMEOUT = datetime.timedelta(seconds=300)


class Rendezvous:
    """The store through which the workers of one stage find each other; rank 0 hosts it.

    Args:
        host: of the worker; listened on only where that is allowed, else its loopback.
    """

    def __init__(self, host: str) -> None:
        host = host if is_loopback(host) or plain_allowed() else _LOOPBACK
        # A socket of our own: the store's would listen on all of the machine's addresses.
        listener = socket.create_server((host, 0), family=_family(host))
        port = listener.getsockname()[1]
        self.store = dist.TCPStore(  # type: ignore[attr-defined]
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
        )
        self.address = f"{host}:{port}"


def plain_allowed() -> bool:
    """Whether whoever runs this node lets sums cross the network unencrypted."""
    return os.environ.get(PLAIN) == "1"


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][0]


class StageGroup:
    """The workers of one stage; with one worker every call is free.

    Args:
        rendezvous: host:port of rank 0's store.
        own: rank 0's own store.
        combiner: what the workers use instead where they are on several hosts.

    Raises:
        SecurityError: rank 0 would have sums cross the network in the clear, and this node not.
        PeerLostError: from every method that exchanges tensors, when a worker went away.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        rendezvous: str,
        own: Rendezvous | None,
        device: torch.device,
        combiner: Combiner | None = None,
    ) -> None:
        self.rank = rank
        self.size = size
        self._device = device
        self._flat: Tensor | None = None
        self._combiner = combiner
        if size == 1 or combiner is not None:
            return
        host, _, port = rendezvous.rpartition(":")
        if is_loopback(host):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
            os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
        elif not plain_allowed():
            raise SecurityError(
                f"{PLAIN}=1 is set where worker 0 runs ({host}), and not here; expected the same "
                "on all nodes"
            )
        with peers_needed():
            store = (
                own.store if own else dist.TCPStore(host, int(port), is_master=False)  # type: ignore[attr-defined]
            )
            dist.init_process_group(
                "nccl" if device.type == "cuda" else "gloo",
                store=PrefixStore("stage", store),
                rank=rank,
                world_size=size,
                timeout=_TIMEOUT,
                device_id=device if device.type == "cuda" else None,
            )

    def sum_gradients(
        self,
        parameters: Sequence[Tensor],
        scalars: Sequence[Tensor] = (),
        loads: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Sum gradients, `scalars` and `loads` over the workers; the summed scalars.

        Parameters that a tag calls experts are left out: one worker has their whole gradient.
        """
        if self.size == 1:
            return list(scalars)
        for load in loads:
            self._add_up(load)
        parameters = _replicas(parameters)
        count = sum(p.numel() for p in parameters)
        if self._flat is None or len(self._flat) != count + len(scalars):
            self._flat = torch.empty(count + len(scalars), device=self._device)
        flat, offset = self._flat, 0
        for p in parameters:
            part = flat[offset : offset + p.numel()]
            part.zero_() if p.grad is None else part.copy_(p.grad.view(-1))
            offset += p.numel()
        for number, scalar in enumerate(scalars, count):
            flat[number].copy_(scalar)
        self._add_up(flat)
        offset = 0
        for p in parameters:
            part = flat[offset : offset + p.numel()].view_as(p)
            if p.grad is None:
                p.grad = part.clone()
            else:
                p.grad.copy_(part)
            offset += p.numel()
        return list(flat[count:].clone())

    @peers_needed()
    def share_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Give every worker rank 0's initial values."""
        if self.size > 1:
            for p in _replicas(parameters):
                if self._combiner is not None:
                    self._combiner.first(p.data)
                else:
                    dist.broadcast(p.data, src=0)

    @peers_needed()
    def barrier(self) -> None:
        """Wait for all workers of the stage."""
        if self._combiner is not None:
            self._combiner.meet()
        elif self.size > 1:
            dist.barrier()

    @property
    def has_processes(self) -> bool:
        """Whether the workers are the default group of torch.distributed."""
        return self.size > 1 and self._combiner is None

    def any(self, mine: bool) -> bool:
        """Whether it holds for any worker."""
        if self.size == 1:
            return mine
        count = torch.tensor([float(mine)], device=self._device)
        self._add_up(count)
        return count.item() > 0

    def gather(self, values: Tensor) -> Tensor:
        """All workers' values [n, ...] one after the other, on every worker and where they were."""
        if self.size == 1:
            return values
        where = values.device
        values = values.to(self._device)  # NCCL takes no other
        sizes = self._all(values.new_tensor([len(values)], dtype=torch.int64))
        longest = int(max(sizes))
        padded = values.new_zeros((longest, *values.shape[1:]))
        padded[: len(values)] = values
        parts = self._all(padded)
        return torch.cat([p[: int(n)] for p, n in zip(parts, sizes, strict=True)]).to(where)

    def close(self) -> None:
        """Leave the group."""
        if self._combiner is not None:
            self._combiner.close()
        elif self.size > 1:
            dist.destroy_process_group()

    @peers_needed()
    def _add_up(self, values: Tensor) -> None:
        if self._combiner is not None:
            self._combiner.sum(values)
        else:
            dist.all_reduce(values)

    @peers_needed()
    def _all(self, values: Tensor) -> list[Tensor]:
        """Every worker's values, of one shape, by rank."""
        if self._combiner is not None:
            return self._combiner.all(values)
        parts = [torch.empty_like(values) for _ in range(self.size)]
        dist.all_gather(parts, values)
        return parts


def _replicas(parameters: Sequence[Tensor]) -> list[Tensor]:
    return [p for p in parameters if reduced_over(p) == "replica"]
