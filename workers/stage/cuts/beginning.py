"""Where a worker's training begins: at the first step, or at a cut.

A cut is read by every worker for the layers of its own stage, whatever plan it was taken under.
What it must agree with is the model, its data and how it is trained.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from protos.job_pb2 import JobSpec
from protos.naming import table_prefix
from protos.node_pb2 import LaunchRequest
from protos.training import differences
from workers.data.check import splits
from workers.model.chain.graph import StageGraph
from workers.model.code.digest import entry_digest, entry_files
from workers.model.objective.curve import LossCurve
from workers.model.saved.cut import (
    Cut,
    DenseFiles,
    ScaleState,
    UnfitCutError,
    Validated,
    check_tables,
    read_cut,
    split_place,
)
from workers.model.saved.warm_start import Weights
from workers.stage.cuts.state import StageState, base_names, give

_log = logging.getLogger("heterps.stage")


@dataclass(frozen=True, slots=True)
class Beginning:
    """What training begins with.

    Attributes:
        step: how many steps were taken.
        samples: of these.
        applied: those of them that were not skipped.
        scales: of the loss; None: as at first.
        curve: the losses of these steps.
        train_seconds: that they took.
        state: of the stage's layers, which have their weights already; None: it is all new.
        tables: where the save lies that the tables begin with; empty for none.
        rename: prefixes of the tables' names, in the save and of this job.
        validated: what held-out data gave so far.
        to_validate: whether it is to be measured before the next step is applied.
        committed: whether the tables had all these steps: training was over.
        stopped: whether the training is to end with these.
        position: where the data of the next step is read from, as of `GlobalBatches`.
        contents: of the job's splits so far, as of `Dataset`, a line each; empty: nobody knows.
    """

    step: int = 0
    samples: int = 0
    applied: int = 0
    scales: ScaleState | None = None
    curve: LossCurve = field(default_factory=LossCurve)
    train_seconds: float = 0.0
    state: StageState | None = field(default=None, repr=False)
    tables: str = ""
    rename: tuple[str, str] = ("", "")
    validated: Sequence[Validated] = ()
    to_validate: bool = False
    committed: bool = False
    position: str = ""
    stopped: bool = False
    contents: str = ""

    def check_contents(self, found: str, job: JobSpec) -> None:
        """Refuse other data than what training has had so far: samples would come twice, or never.

        Args:
            found: of the splits now; only those are compared that both have.

        Raises:
            UnfitCutError: it is other data.
        """
        both = zip(splits(job), self.contents.split("\n"), found.split("\n"), strict=False)
        for split, before, now in both:
            if before not in ("", now):
                done = "trained" if split == "train" else "measured"
                raise UnfitCutError(
                    f"data.{split}: {getattr(job.data, split)}: other contents than step "
                    f"{self.step} was {done} with; expected the files as they were. Begin another "
                    "job with the weights by train.from"
                )


def beginning_of(
    launch: LaunchRequest,
    graph: StageGraph,
    staleness: int,
    weights: Weights | None = None,
    *,
    place: str,
    folder: Path | None = None,
) -> Beginning:
    """Where a worker begins; its stage's layers are given their weights.

    Args:
        folder: for files of what a cut has of experts out of memory; None: all is read into it.
        weights: that they have already, of `train.from`.
        place: folder or URL of the cut to go on from; empty: the first step.

    Raises:
        CutError: the cut to go on from is gone or damaged.
        UnfitCutError: it is one of another job, model or training.
    """
    if not place:
        if weights is None:
            return Beginning()
        rename = weights.prefix, table_prefix(launch.job_id)
        return Beginning(tables=weights.tables, rename=rename)
    cut = read_cut(place)
    _check(cut, launch, place)
    cuts, _ = split_place(place)
    state = state_of(cut, cuts, launch, folder)
    give(graph, state)
    if cut.staleness != staleness:
        _log.info("the cut was taken at staleness %d; going on at %d", cut.staleness, staleness)
    _log.info("going on from %s: %d steps", place, cut.step)
    return Beginning(
        cut.step,
        cut.samples,
        cut.applied,
        cut.scales,
        DenseFiles(cuts).read_losses(cut.losses),
        cut.train_seconds,
        state,
        check_tables(cuts, cut.tables),
        (table_prefix(cut.job_id), table_prefix(launch.job_id)),
        cut.validated,
        position=cut.position,
        contents=cut.contents,
    )


def state_of(cut: Cut, cuts: str, launch: LaunchRequest, folder: Path | None = None) -> StageState:
    """What a cut has of a worker's layers.

    Args:
        cuts: where it lies, with others.
        folder: as of `beginning_of`.

    Raises:
        CutError: a file is gone or damaged.
    """
    dense, plan = DenseFiles(cuts), launch.stages[launch.index]
    wanted = {*base_names(launch.layers[plan.first : plan.last + 1])}
    if launch.index == 0:
        wanted.add("")  # what no layer has
    return StageState.of_layers(
        {kind: dense.read(file, folder) for kind, file in layer.files.items()}
        for layer in cut.layers
        if layer.name in wanted
    )


def _check(cut: Cut, launch: LaunchRequest, where: str) -> None:
    """Refuse a cut that is not of this training.

    Raises:
        UnfitCutError: naming the first key that differs.
    """
    job = launch.job
    if cut.job_id not in (launch.job_id, job.train.resume.job_id):
        raise UnfitCutError(f"{where}: a cut of job {cut.job_id}; expected {launch.job_id}'s")
    found = [layer.name for layer in cut.layers if layer.name]
    if found != base_names(launch.layers):
        raise UnfitCutError(
            f"{where}: its layers are {', '.join(found)}; the model's are "
            f"{', '.join(base_names(launch.layers))}"
        )
    for key, got, expected in differences(job, cut.job):
        raise UnfitCutError(f"{key}: got {got}; the cut {where} was taken with {expected}")


def check_entry(job: JobSpec) -> None:
    """Refuse other files than were submitted: without code that is sent they may have changed.

    Some of a job's workers would compute what others do not.

    Raises:
        UnfitCutError
    """
    if not job.entry_digest or job.code_digest:
        return
    if entry_digest(job) != job.entry_digest:
        files = " or ".join(map(str, entry_files(job)))
        raise UnfitCutError(
            f"model.entry: {files} has changed since the job was submitted, or what it imports "
            "from beside it; expected what it was, for all of its workers and checkpoints. Begin "
            "another job, with weights by train.from"
        )
