"""Micro-batches on their way out: copied back from a GPU, packed and sent in the background.

On a CPU they are sent at once: the core that would do it in the background is the same.
"""

from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor

from torch import Tensor

from workers.device.copies import Staging
from workers.links.frames import Frame, FrameId
from workers.links.transport import Neighbours

_MAX_PENDING = 8


class Outbox:
    """What one worker sends to a neighbouring stage, in the order in which it was told to.

    Args:
        peers: the stage's workers.
        staging: from the device that the tensors are on.
    """

    def __init__(self, peers: Neighbours, staging: Staging) -> None:
        self._peers = peers
        self._staging = staging
        self._pending: deque[Future[None]] = deque()
        self._sending = (
            ThreadPoolExecutor(1, thread_name_prefix="send") if staging.background else None
        )

    def send(self, frame: FrameId, tensors: Mapping[str, Tensor]) -> None:
        """Send one micro-batch; gradients are asked for of those tensors that require one.

        Raises:
            RpcError: an earlier frame could not be delivered.
        """
        wanted = frozenset(name for name, tensor in tensors.items() if tensor.requires_grad)
        names, copied = list(tensors), self._staging.download(list(tensors.values()))

        def go() -> None:
            on_host = dict(zip(names, copied.wait(), strict=True))
            self._peers.send(Frame(frame, on_host, wanted))
            copied.release()

        if self._sending is None:
            go()
            return
        while self._pending and (len(self._pending) >= _MAX_PENDING or self._pending[0].done()):
            self._pending.popleft().result()
        self._pending.append(self._sending.submit(go))

    def end(self, phase: str) -> None:
        """Tell every worker that nothing more of `phase` comes, once all of it has arrived."""
        while self._pending:
            self._pending.popleft().result()
        self._peers.end(phase)

    def leave(self) -> None:
        """Say that nothing more comes, once a phase has ended here."""
        self._peers.leave()

    def close(self) -> None:
        """Close the channels; what has not been sent stays here."""
        if self._sending is not None:
            self._sending.shutdown(wait=False, cancel_futures=True)
        self._peers.close()
