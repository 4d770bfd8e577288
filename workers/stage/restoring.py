"""At the end of a training the best of its states becomes the model: its layers and tables.

It is that of a cut which its validation has taken, by this job or by one that it goes on from.
"""

import logging
from dataclasses import replace

from protos.naming import KEPT, TAKEN_OVER, table_prefix
from protos.stage_pb2 import RESTORED
from workers.learning.averages import AVERAGE
from workers.model.saved.cut import (
    Cut,
    CutError,
    UnfitCutError,
    check_tables,
    read_cut,
    split_place,
)
from workers.stage.cuts.beginning import state_of
from workers.stage.cuts.state import give
from workers.stage.experts.outside import outside_of
from workers.stage.experts.split import own_state
from workers.stage.parts import Parts
from workers.stage.share import Share

_log = logging.getLogger("heterps.stage")


def check_best(share: Share, parts: Parts, cuts: str) -> None:
    """At the judge: see that the best state so far is there, before anything is trained.

    Args:
        cuts: where those of the job lie now.

    Raises:
        UnfitCutError: it is not.
    """
    best = parts.executor.following.validations.best
    if best is not None and best.step != parts.executor.progress.step:
        try:
            _place_of(share, parts, cuts)
        except CutError as error:
            raise UnfitCutError(f"the best state so far, of step {best.step}: {error}") from None


def restore_best(share: Share, parts: Parts, cuts: str) -> int:
    """Have the job's layers and tables be those of the best validation; all workers call it.

    Without effect where the state is that of the best, or none was measured.

    Args:
        cuts: where those of the job lie now.

    Returns:
        The step that the state is of.

    Raises:
        CutError: the cut of the best is gone or damaged.
    """
    executor, place = parts.executor, share.place
    best, step = executor.following.validations.best, executor.progress.step
    if best is None or best.step == step:
        return step
    inbox, board = parts.links.inbox, parts.notices.board
    workers = [(stage, rank) for stage, width in enumerate(place.widths) for rank in range(width)]
    parts.notices.tell((0, 0), RESTORED, step)  # no commit of its stage is on its way any more
    if place.stage == place.rank == 0:
        inbox.wait(lambda: board.count(RESTORED, step) == len(workers))
        where = _place_of(share, parts, cuts)
        cut = read_cut(where)
        tables = check_tables(split_place(where)[0], cut.tables)
        prefixes = table_prefix(cut.job_id), table_prefix(share.launch.job_id)
        parts.client.load(tables, rename=prefixes)
        for worker in workers:
            parts.notices.tell(worker, RESTORED, step, facts=where)

    def told() -> list[str]:
        return [notice.facts for notice in board.of(RESTORED, step).values() if notice.facts]

    inbox.wait(lambda: bool(told()))
    _give(share, parts, told()[0])
    if place.rank == 0:
        parts.rows.evict()
    parts.group.barrier()
    _log.info(
        "the model is that of step %d, the best by %s",
        best.step,
        share.launch.job.train.validate.metric,
    )
    return best.step


def _give(share: Share, parts: Parts, where: str) -> None:
    """Give the stage's layers what a cut has of them: averages of weights where it keeps these."""
    state = state_of(read_cut(where), split_place(where)[0], share.launch, share.folder)
    averages = {name: kept[AVERAGE] for name, kept in state.optimizer.items() if AVERAGE in kept}
    weights = own_state(parts.graph.module, {**state.weights, **averages})
    if (outside := outside_of(parts.graph.module)) is not None:
        outside.put(state.weights)
    parts.versions.use_newest(parts.executor.progress.step)
    give(parts.graph, replace(state, weights=weights))
    parts.update.begin_averages()


def _place_of(share: Share, parts: Parts, cuts: str) -> str:
    """Where the cut of the best state lies: of this job, or of the one that it goes on from."""
    best = parts.executor.following.validations.best
    assert best is not None
    folders = [cuts]
    if origin := share.launch.job.train.resume.place:
        kept = f"{split_place(cuts)[0]}/{TAKEN_OVER}"
        folders.append(kept if origin.startswith(KEPT) else split_place(origin)[0])
    for folder in folders:
        place = f"{folder}/{best.step}"
        cut = _readable(place)
        if cut is not None and cut.validated and cut.validated[-1] == best:
            return place
    raise CutError(f"{cuts}/{best.step}: no cut of the best validation")


def _readable(place: str) -> Cut | None:
    try:
        return read_cut(place)
    except CutError:
        return None
