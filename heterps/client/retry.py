"""How long a scheduler that is followed may be away: one rule for `watch`, `wait` and `logs -f`."""

import time
from collections.abc import Callable

from heterps.errors import HeterpsError, UnreachableError

AWAY_S = 30.0
PAUSE_S = 0.5  # between attempts


class Retry:
    """Says whether to go on after a failure; whoever does pauses for PAUSE_S first.

    Args:
        away_s: for which the scheduler may be away.
    """

    def __init__(self, away_s: float = AWAY_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._away_s = away_s
        self._clock = clock
        self._away_since: float | None = None

    def succeeded(self) -> None:
        """Something came: the scheduler is there."""
        self._away_since = None

    def failed(self, error: HeterpsError) -> None:
        """Nothing came but `error`.

        Raises:
            HeterpsError: `error`, as it is of no use to go on.
        """
        now = self._clock()
        if self._away_since is None:
            self._away_since = now
        if not isinstance(error, UnreachableError) or now - self._away_since >= self._away_s:
            raise error from None
