"""One worker's place in the pipeline, and its ways to the stages before and after."""

from dataclasses import dataclass

from workers.links.inbox import Inbox
from workers.links.outbox import Outbox


@dataclass(frozen=True, slots=True)
class Place:
    """Which worker of which stage this is.

    Args:
        stage, rank: its numbers, from 0.
        widths: workers of every stage.
    """

    stage: int
    rank: int
    widths: tuple[int, ...]

    @property
    def width(self) -> int:
        """Workers of this stage."""
        return self.widths[self.stage]

    @property
    def width_before(self) -> int:
        """Workers of the stage before; 0: this one reads the data."""
        return self.widths[self.stage - 1] if self.stage else 0

    @property
    def in_last_stage(self) -> bool:
        """Whether this stage ends in the prediction."""
        return self.stage == len(self.widths) - 1

    @property
    def leads(self) -> bool:
        """Whether this worker speaks for the job: rank 0 of the last stage."""
        return self.in_last_stage and self.rank == 0


@dataclass(frozen=True, slots=True)
class Links:
    """What comes from the neighbouring stages and what goes there; None at the ends."""

    inbox: Inbox
    before: Outbox | None
    after: Outbox | None

    def leave(self) -> None:
        """Say that nothing more comes from here."""
        for outbox in (self.before, self.after):
            if outbox is not None:
                outbox.leave()

    def close(self) -> None:
        """Close the ways out."""
        for outbox in (self.before, self.after):
            if outbox is not None:
                outbox.close()
