"""A step's tensors on GPUs, summed over a stage's workers by NCCL while the step goes on."""

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

from workers.errors import peers_needed
from workers.links.step_sum import Buckets, copy_back, flattened, is_one


@dataclass(frozen=True, slots=True)
class _Sent:
    """A bucket that NCCL has, and the tensors that it is a copy of; none: its own memory."""

    values: Tensor
    tensors: Sequence[Tensor]
    work: Any


class GpuSum:
    """The sums of one step; made by `GpuSums`."""

    def __init__(self, sums: "GpuSums") -> None:
        self._sums = sums
        self._buckets = Buckets()
        self._sent: list[_Sent] = []
        self.waiting: deque[list[Tensor]] = deque()
        self.ended = False

    def add(self, tensors: Sequence[Tensor]) -> None:
        """As `StepSum.add`."""
        self.waiting.extend(self._buckets.add(tensors))
        self._sums.send()

    def wait(self) -> None:
        """As `StepSum.wait`; what the caller's stream does from now on sees the sums."""
        self.waiting.extend(self._buckets.rest())
        self.ended = True
        self._sums.send()
        if self.waiting:
            raise RuntimeError("a step's sums are waited for before those of an earlier one")
        with peers_needed():
            for sent in self._sent:
                sent.work.wait()
                copy_back(sent.values, sent.tensors)
        self._sent = []

    def send(self) -> None:
        """Give NCCL what waits."""
        while self.waiting:
            tensors = self.waiting.popleft()
            flat = flattened(tensors)
            with peers_needed():
                work = dist.all_reduce(flat, async_op=True)
            self._sent.append(_Sent(flat, () if is_one(tensors) else tensors, work))


class GpuSums:
    """The sums of all steps: NCCL takes collectives in the same order on all workers alone.

    So a later step's begin once all of the earlier one's have. One thread may add to a step while
    another waits for the one before.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._open: deque[GpuSum] = deque()

    def begin(self) -> GpuSum:
        """Begin the sums of the next step."""
        begun = GpuSum(self)
        with self._lock:
            self._open.append(begun)
        return begun

    def send(self) -> None:
        """Give NCCL what may be given."""
        with self._lock:
            while self._open:
                ended = self._open[0].ended  # so that nothing comes after what is sent here
                self._open[0].send()
                if not ended:
                    return
                self._open.popleft()

    @staticmethod
    def abort() -> None:
        """A worker is gone: end what NCCL would wait for it with."""
        distributed_c10d._abort_process_group()
