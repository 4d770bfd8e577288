"""What neighbours sent, until a worker takes it."""

import threading
from collections import defaultdict, deque
from collections.abc import Callable

from workers.links.frames import EVALUATE, Frame, FrameId

_MAX_EVALUATION_FRAMES = 32
_LOOK_S = 0.2


class Stopped(RuntimeError):  # noqa: N818
    """The job was cancelled, or this process was asked to end."""


class Inbox:
    """Frames that arrived and were not yet taken."""

    def __init__(self, stop: threading.Event) -> None:
        self._stop = stop
        self._ready = threading.Condition()
        self._closed = False
        self._lost: Exception | None = None
        self._training: dict[FrameId, Frame] = {}
        self._evaluation: dict[str, deque[Frame]] = defaultdict(deque)
        self._ended: dict[str, set[int]] = defaultdict(set)
        # Told of each frame of training before it can be taken.
        self.on_arrival: Callable[[Frame], None] | None = None

    @property
    def stopped(self) -> bool:
        """Whether the process was asked to end, or this was closed."""
        return self._stop.is_set() or self._closed

    def put(self, frame: Frame) -> None:
        """Add a frame; holds the sender of evaluation frames while too many wait."""
        training = frame.id.kind != EVALUATE
        if training and self.on_arrival is not None:
            self.on_arrival(frame)
        with self._ready:
            if training:
                self._training[frame.id] = frame
            else:
                queue = self._evaluation[frame.id.phase]
                while len(queue) >= _MAX_EVALUATION_FRAMES and not self.stopped:
                    self._ready.wait(_LOOK_S)
                queue.append(frame)
            self._ready.notify_all()

    def end(self, phase: str, sender: int) -> None:
        """Note that a worker of the stage before has nothing more of a phase."""
        with self._ready:
            self._ended[phase].add(sender)
            self._ready.notify_all()

    def has(self, frame: FrameId) -> bool:
        """Whether that frame of training is here."""
        return frame in self._training

    def peek(self, frame: FrameId) -> Frame | None:
        """That frame of training, if it is here."""
        return self._training.get(frame)

    def take(self, frame: FrameId) -> Frame:
        """Wait for a frame of training and take it."""
        self.wait(lambda: frame in self._training)
        with self._ready:
            return self._training.pop(frame)

    def ended(self, phase: str, senders: int) -> bool:
        """Whether all workers of the stage before have ended the phase."""
        return len(self._ended[phase]) >= senders

    def next_evaluation(self, phase: str, senders: int) -> Frame | None:
        """The next evaluation frame in order of arrival, None after the last."""
        self.wait(lambda: bool(self._evaluation[phase]) or self.ended(phase, senders))
        with self._ready:
            queue = self._evaluation[phase]
            frame = queue.popleft() if queue else None
            self._ready.notify_all()
            return frame

    def close(self) -> None:
        """Have nobody wait any longer."""
        self._closed = True
        self.wake()

    def lose(self, error: Exception) -> None:
        """Have whoever waits for what is not here meet this error."""
        self._lost = error
        self.wake()

    def wake(self) -> None:
        """Have those who wait look at their conditions again."""
        with self._ready:
            self._ready.notify_all()

    def wait(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds.

        Raises:
            Stopped: the process was asked to end first, or this was closed.
            Exception: that of `lose`.
        """
        with self._ready:
            while not condition():
                if self.stopped:
                    raise Stopped("stopped")
                if self._lost is not None:
                    raise self._lost
                self._ready.wait(_LOOK_S)
