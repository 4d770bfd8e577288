"""That a training is to end before its last step, as a callback has asked."""


class Stop:
    """What one worker knows of it; the verdict on the first step to be dropped tells all.

    Args:
        at: that step, where the training went so far already; None: it is not to end early.
        staleness: updates that a step lacks.

    Attributes:
        heard: whether the verdict is here.
    """

    def __init__(self, at: int | None, staleness: int) -> None:
        self._at = at
        self._staleness = staleness
        self.heard = False

    def ask(self, steps: int) -> None:
        """End after so many steps, and those that may have begun meanwhile: as many as are stale.

        So the step that the training ends with depends on no timing.
        """
        at = steps + self._staleness
        self._at = at if self._at is None else min(self._at, at)

    def is_due(self, step: int) -> bool:
        """Whether a step, from 0, is to be dropped with all that follow."""
        return self._at is not None and step >= self._at
