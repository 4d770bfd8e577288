"""The terms of a step's loss, by name, summed over the workers of the last stage.

Which terms there are only the job's own loss knows, when it is computed. So a worker tells the
others of a term that sums do not have yet, with its part of it; sums have it from the first step on
that nobody can have begun before all had heard of it.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from protos.stage_pb2 import TERMS
from workers.links.notices import Notices
from workers.links.pipeline import Place


class LossTerms:
    """Those of one worker's steps.

    Args:
        staleness: updates that a step lacks.
        names: that all workers of the stage begin with.
    """

    def __init__(
        self, place: Place, notices: Notices, staleness: int, names: Iterable[str] = ()
    ) -> None:
        self._place = place
        self._notices = notices
        self._staleness = staleness
        self._since = dict.fromkeys(sorted(names), 0)  # the first step whose sums have a term

    def to_sum(self, step: int, loss: Tensor, terms: Mapping[str, Tensor]) -> Tensor:
        """What is summed of a step over the workers, float64 [2 + terms]; in order of steps.

        Args:
            loss: float64 [], this worker's part, all terms together.
            terms: float64 [] each, its parts of those that have a name.
        """
        names = self._names(step)
        new = {name: term.item() for name, term in terms.items() if name not in names}
        if new:
            for rank in range(self._place.width):
                to = self._place.stage, rank
                self._notices.tell(to, TERMS, step, facts=json.dumps(new))
        none = torch.zeros_like(loss)
        tellers = torch.full_like(loss, float(bool(new)))
        return torch.stack([loss, tellers, *(terms.get(name, none) for name in names)])

    def of_sums(
        self, step: int, sums: Sequence[float], wait: Callable[[Callable[[], bool]], None]
    ) -> dict[str, float]:
        """The whole batch's terms by name; on one thread, in order of steps.

        Args:
            sums: over the workers, of `to_sum`.
            wait: until something is so, which another worker tells.
        """
        _, tellers, *values = sums
        board = self._notices.board
        found = dict(zip(self._names(step), values, strict=True))
        if not tellers:
            return found
        wait(lambda: board.count(TERMS, step) == tellers)
        for _, notice in sorted(board.of(TERMS, step).items()):
            for name, value in json.loads(notice.facts).items():
                found[name] = found.get(name, 0.0) + value
        # Another dict: who computes the next steps may be reading this one.
        since = dict.fromkeys(sorted(found.keys() - self._since.keys()), step + 1 + self._staleness)
        self._since = {**self._since, **since}
        return found

    def _names(self, step: int) -> list[str]:
        return [name for name, since in self._since.items() if since <= step]
