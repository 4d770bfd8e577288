"""What the workers of a stage do together: sums of their dense gradients above all.

They are a ring (`workers/links/ring.py`), on one host as on several. NCCL sums gradients on GPUs
where it may: on one host, or where HETERPS_PLAIN_COLLECTIVES=1 on every node lets collectives of
torch's, which encrypt nothing and ask nobody who they are, cross the network.
"""

import datetime
import os
import socket
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from safetensors.torch import load as unpack
from safetensors.torch import save as pack
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore

from chassis.security import SecurityError, is_loopback
from workers.errors import peers_needed
from workers.learning.reduction import reduced_over
from workers.links.gpu_sum import GpuSums
from workers.links.plain import PLAIN, plain_allowed
from workers.links.ring import Ring
from workers.links.step_sum import NoSum, RingSum, StepSum

_LOOPBACK = "127.0.0.1"
_TIMEOUT = datetime.timedelta(seconds=300)
_ALL_THERE = -(1 << 40)  # a series of the ring that is no step, nor any call of a group's


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


def _family(host: str) -> socket.AddressFamily:
    return socket.getaddrinfo(host.strip("[]"), None, type=socket.SOCK_STREAM)[0][0]


def join_processes(
    rank: int,
    size: int,
    rendezvous: str,
    own: Rendezvous | None,
    device: torch.device,
    generation: int = 0,
) -> None:
    """Make the workers of a stage the default group of torch.distributed; all call it.

    Args:
        rendezvous: host:port of rank 0's store.
        own: rank 0's own store.
        generation: of the workers, whose addresses the store has apart from those of others.

    Raises:
        SecurityError: rank 0 would have collectives cross the network in the clear, and this node
            not.
        PeerLostError: a worker went away.
    """
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
            store=PrefixStore(f"stage {generation}", store),
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )


def wait_for_all(ring: Ring) -> None:
    """Wait until all workers of a ring are there; unlike `join_processes` this can be stopped.

    Raises:
        PeerLostError: one went away.
        Stopped: as the ring was told.
    """
    total = RingSum(ring, _ALL_THERE)
    total.add([torch.zeros(1)])
    total.wait()


def leave_processes() -> None:
    """Have those who wait for this worker in a collective notice, if it is in such a group."""
    if dist.is_initialized():
        dist.destroy_process_group()


def processes_allowed(addresses: Sequence[str], rendezvous: str) -> bool:
    """Whether workers at these addresses may be a group of torch.distributed.

    Args:
        rendezvous: host:port of rank 0's store: beyond loopback only where that is allowed.
    """
    hosts = {address.rpartition(":")[0] for address in addresses}
    return len(hosts) == 1 or not is_loopback(rendezvous.rpartition(":")[0])


class StageGroup:
    """The workers of one stage; with one worker every call is free.

    Args:
        device: that gradients are on.
        ring: of the workers; None: there is one.
        has_processes: whether they are the default group of torch.distributed.

    Attributes:
        overlaps: whether to add to a sum keeps a backward that runs from nothing: values on a GPU
            that go round the ring are waited for.

    Raises:
        PeerLostError: from every method that exchanges tensors, when a worker went away.
    """

    def __init__(
        self, device: torch.device, ring: Ring | None = None, *, has_processes: bool = False
    ) -> None:
        self.rank = ring.rank if ring is not None else 0
        self.size = ring.size if ring is not None else 1
        self.has_processes = has_processes
        self._ring = ring
        self._calls = 0
        on_gpu = device.type == "cuda"
        self._on_gpus = GpuSums() if has_processes and on_gpu else None
        self.overlaps = ring is not None and (self._on_gpus is not None or not on_gpu)
        if ring is not None and self._on_gpus is not None:
            ring.on_loss = self._on_gpus.abort

    def begin_sum(self, step: int) -> StepSum:
        """Begin the sums of a step's tensors over the workers, which all begin steps in order.

        Those of several steps may be open at once. On the ring each element is added in the order
        of ranks, ((x0 + x1) + x2) + ..., in its own dtype; on GPUs in an order of NCCL's, which a
        group keeps.
        """
        if self._ring is None:
            return NoSum()
        return RingSum(self._ring, step) if self._on_gpus is None else self._on_gpus.begin()

    def sum_gradients(
        self,
        parameters: Sequence[Tensor],
        scalars: Sequence[Tensor] = (),
        loads: Sequence[Tensor] = (),
    ) -> list[Tensor]:
        """Sum gradients, `scalars` and `loads` over the workers; the summed scalars.

        Parameters that a tag calls experts are left out: one worker has their whole gradient.
        """
        if self._ring is None:
            return list(scalars)
        gradients = []
        for p in replicas(parameters):
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            gradients.append(p.grad)
        sums = [scalar.detach().clone() for scalar in scalars]
        total = self._on_gpus.begin() if self._on_gpus else self._call(self._ring)
        total.add([*loads, *gradients, *sums])
        total.wait()
        return sums

    def share_parameters(self, parameters: Sequence[Tensor]) -> None:
        """Give every worker rank 0's initial values."""
        if self._ring is None:
            return
        total, shared = self._call(self._ring), []
        for p in replicas(parameters):
            values = p.detach()
            # Zeros and bytes sum to the same bytes, whatever they mean.
            sent = values.contiguous() if self.rank == 0 else torch.zeros_like(values).contiguous()
            total.add([_bytes(sent)])
            shared.append((values, sent))
        total.wait()
        for values, sent in shared:
            values.copy_(sent)

    def barrier(self) -> None:
        """Wait for all workers of the stage."""
        self.any(False)

    def any(self, mine: bool) -> bool:
        """Whether it holds for any worker."""
        found = torch.tensor([int(mine)])
        self.add_up([found])
        return found.item() > 0

    def gather(self, values: Tensor) -> Tensor:
        """All workers' values [n, ...] one after the other, on every worker and where they were."""
        if self._ring is None:
            return values
        counts = torch.zeros(self.size, dtype=torch.int64)
        counts[self.rank] = len(values)
        self.add_up([counts])
        everything = torch.zeros((int(counts.sum()), *values.shape[1:]), dtype=values.dtype)
        first = int(counts[: self.rank].sum())
        everything[first : first + len(values)] = values
        self.add_up([_bytes(everything)])
        return everything.to(values.device)

    def gather_named(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all workers, of other names on each; on the host but where there is one.

        They come in the order of ranks.
        """
        own = {name: tensor.detach() for name, tensor in values.items()}
        if self._ring is None:
            return own
        whole = torch.contiguous_format
        bare = {name: t.cpu().clone(memory_format=whole) for name, t in own.items()}
        mine = torch.frombuffer(bytearray(pack(bare)), dtype=torch.uint8)
        sizes = self.gather(torch.tensor([len(mine)])).tolist()
        every = [unpack(one.numpy().tobytes()) for one in self.gather(mine).split(sizes)]
        return {name: tensor for one in every for name, tensor in one.items()}

    def add_up(self, values: Sequence[Tensor]) -> None:
        """Sum tensors over the workers, in place, each element in the order of ranks."""
        if self._ring is not None:
            total = self._call(self._ring)
            total.add(values)
            total.wait()

    def check(self) -> None:
        """Raise at once where a worker is known to have gone away."""
        if self._ring is not None:
            self._ring.check()

    def close(self) -> None:
        """Leave the group."""
        if self._ring is not None:
            self._ring.close()
        if self.has_processes:
            leave_processes()

    def _call(self, ring: Ring) -> RingSum:
        self._calls += 1
        return RingSum(ring, -self._calls)  # steps have the other numbers


def _bytes(values: Tensor) -> Tensor:
    return values.view(-1).view(torch.uint8)


def replicas(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Those whose gradients are summed over the stage: all but split experts."""
    return [p for p in parameters if reduced_over(p) == "replica"]
