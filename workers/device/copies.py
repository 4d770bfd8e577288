"""Tensors between the host and a stage's device, copied while the device computes.

`CopyStreams` copies through pinned buffers on two streams of its own, one each way, so the inputs
of the next micro-batch come and gradients go while this one is computed. `OnHost` is its twin for
a CPU, where nothing has to be copied. Both may be used by several threads at once.
"""

import threading
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

_ALIGNMENT = 64  # bytes: torch's own on a CPU
_LEAST_BYTES = 4096  # of a buffer; sizes are powers of two, so that a few serve all batches


class Upload(Protocol):
    """A tensor under way to the device."""

    def here(self) -> Tensor:
        """The tensor on the device; what the caller's stream does from now on sees all of it."""
        ...


class Download(Protocol):
    """Tensors under way to the host."""

    def wait(self) -> Sequence[Tensor]:
        """The tensors on the host, in order; valid until `release`."""
        ...

    def release(self) -> None:
        """Give the memory of the tensors back; who never does lets it go to waste, no more."""
        ...


class Staging(Protocol):
    """Copies to a device and back."""

    @property
    def background(self) -> bool:
        """Whether copies take time that a thread of its own had better wait for."""
        ...

    def upload(self, tensor: Tensor) -> Upload:
        """Begin to copy a tensor of the host, which the caller must not change from now on."""
        ...

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Begin to copy tensors back, as the caller's stream leaves them by what it has so far."""
        ...


def staging_for(device: torch.device) -> Staging:
    """What serves a device."""
    return CopyStreams(device) if device.type == "cuda" else OnHost()


@dataclass(frozen=True, slots=True)
class _Here:
    """An upload and a download at once: the tensors are where they are wanted."""

    tensors: Sequence[Tensor]

    def here(self) -> Tensor:
        return self.tensors[0]

    def wait(self) -> Sequence[Tensor]:
        return self.tensors

    def release(self) -> None:
        pass


class OnHost:
    """The staging of a CPU: every tensor is there already."""

    background = False

    def upload(self, tensor: Tensor) -> Upload:
        """The tensor itself, or a copy where it does not lie as torch would have it.

        Matrix products may round otherwise in other places of memory, and where a frame or a batch
        lies depends on chance.
        """
        astray = tensor.is_floating_point() and tensor.data_ptr() % _ALIGNMENT
        return _Here((tensor.clone() if astray else tensor,))

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """The tensors themselves, without autograd."""
        return _Here([tensor.detach() for tensor in tensors])


class Buffers:
    """Host memory that copies go through, used again once they are done.

    Args:
        pinned: whether to lock its pages, without which a GPU's copies wait for the host.

    Attributes:
        made: how many buffers there are.
    """

    def __init__(self, pinned: bool) -> None:
        self.made = 0
        self._pinned = pinned
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = defaultdict(list)  # by size
        self._busy: deque[tuple[Any, Tensor]] = deque()  # until their events

    def take(self, size: int) -> Tensor:
        """A uint8 buffer of at least `size` bytes, the caller's own until it is given back."""
        capacity = max(_LEAST_BYTES, 1 << (size - 1).bit_length() if size else 0)
        with self._lock:
            while self._busy and self._busy[0][0].query():  # a stream ends its copies in order
                _, buffer = self._busy.popleft()
                self._free[len(buffer)].append(buffer)
            if self._free[capacity]:
                return self._free[capacity].pop()
            self.made += 1
        return torch.empty(capacity, dtype=torch.uint8, pin_memory=self._pinned)

    def give(self, buffer: Tensor, after: Any = None) -> None:
        """Take a buffer back, to be used again now or once the event `after` has come."""
        with self._lock:
            if after is None:
                self._free[len(buffer)].append(buffer)
            else:
                self._busy.append((after, buffer))


@dataclass(frozen=True, slots=True)
class _Upload:
    tensor: Tensor
    done: Any  # an event of the stream that copies
    api: Any

    def here(self) -> Tensor:
        current = self.api.current_stream(self.tensor.device)
        current.wait_event(self.done)
        if self.tensor.is_cuda:  # its memory is the copying stream's, which else would reuse it
            self.tensor.record_stream(current)
        return self.tensor


@dataclass(slots=True)
class _Download:
    tensors: list[Tensor]
    done: Any
    buffers: list[Tensor]
    pool: Buffers
    _given: bool = field(default=False)

    def wait(self) -> Sequence[Tensor]:
        self.done.synchronize()
        return self.tensors

    def release(self) -> None:
        if self._given:
            return
        self._given = True
        for buffer in self.buffers:
            self.pool.give(buffer, self.done)


class CopyStreams:
    """The staging of a GPU.

    On a CPU, whose streams do nothing, it copies too, at once: that is how its tests run anywhere.

    Args:
        device: of the tensors that are not on the host.
    """

    background = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._api: Any = torch.get_device_module(device)
        on_gpu = device.type == "cuda"
        # Buffers of either way are given back in the order of one stream's events.
        self.sending, self.receiving = Buffers(on_gpu), Buffers(on_gpu)
        self._up: Any = torch.cuda.Stream(device) if on_gpu else torch.cpu.Stream()
        self._down: Any = torch.cuda.Stream(device) if on_gpu else torch.cpu.Stream()
        # Events of one stream are to be recorded and queued for reuse in the same order.
        self._uploading = threading.Lock()

    def upload(self, tensor: Tensor) -> Upload:
        """Copy into a pinned buffer now, and from there on the stream of uploads."""
        buffer = self.sending.take(tensor.nbytes)
        host = _view(buffer, tensor)
        host.copy_(tensor.detach())
        done = self._event()
        with self._uploading, self._api.stream(self._up):
            there = torch.empty_like(host, device=self._device)
            there.copy_(host, non_blocking=True)
            done.record(self._up)
            self.sending.give(buffer, done)
        return _Upload(there, done, self._api)

    def download(self, tensors: Sequence[Tensor]) -> Download:
        """Copy into pinned buffers on the stream of downloads, after the caller's stream."""
        ready, done = self._event(), self._event()
        ready.record(self._api.current_stream(self._device))
        self._down.wait_event(ready)
        hosts: list[Tensor] = []
        buffers: list[Tensor] = []
        with self._api.stream(self._down):
            for tensor in tensors:
                if tensor.device.type != self._device.type:
                    hosts.append(tensor.detach())
                    continue
                buffers.append(self.receiving.take(tensor.nbytes))
                hosts.append(_view(buffers[-1], tensor))
                hosts[-1].copy_(tensor.detach(), non_blocking=True)
                if tensor.is_cuda:  # not to be reused before it is copied
                    tensor.record_stream(self._down)
            done.record(self._down)
        return _Download(hosts, done, buffers, self.receiving)

    def _event(self) -> Any:
        # Threads wait for some of them, and are to sleep, not to keep a core busy asking.
        if self._device.type == "cuda":
            return torch.cuda.Event(blocking=True)
        return self._api.Event()


def _view(buffer: Tensor, like: Tensor) -> Tensor:
    """The beginning of a buffer as a tensor of the shape and type of another."""
    return buffer[: like.nbytes].view(like.dtype).view(like.shape)
