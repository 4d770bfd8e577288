"""What is recommended while a job runs: raised, kept and withdrawn with hysteresis.

A proposal is raised when another plan pays by the threshold, and withdrawn when moving no longer
pays at all; between the two nothing changes. Either must be seen `CONFIRM` times in a row, and so
must a different plan that would take its place.
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from scheduler.replanning.proposal import Proposal

CONFIRM = 2


class Recommendation:
    """Takes in a fresh proposal at a time; `proposal` is the one recommended, if any."""

    def __init__(self, confirm: int = CONFIRM) -> None:
        self.proposal: Proposal | None = None
        self._confirm = confirm
        self._wanted: object = None
        self._seen = 0

    def consider(self, fresh: "Proposal") -> "Proposal | None":
        """Weigh `fresh` against the one recommended; return what is then."""
        current = self.proposal
        still_pays = fresh.moves and fresh.net_savings > 0
        if current is not None and (fresh.worthwhile or still_pays):
            if fresh.target == current.target:
                self.proposal = fresh
                self._seen = 0
                return fresh
            if not fresh.worthwhile:
                self._seen = 0
                return current
        wanted = fresh.target if fresh.worthwhile else None
        self._seen = self._seen + 1 if self._seen and wanted == self._wanted else 1
        self._wanted = wanted
        if self._seen >= self._confirm:
            self.proposal = fresh if fresh.worthwhile else None
        return self.proposal
