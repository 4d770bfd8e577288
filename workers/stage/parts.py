"""What runs a worker's share, its parts put together."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from protos.job_pb2 import JobSpec
from ps import ParameterClient
from workers.data.held_out import HeldOut
from workers.links.all_reduce import (
    StageGroup,
)
from workers.links.notices import Notices
from workers.links.pipeline import Links, Place
from workers.model.chain.graph import StageGraph
from workers.model.objective.metrics import JobMetrics
from workers.stage.alike import check_buffers
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.folder import CutFolder
from workers.stage.cuts.judge import CutFacts, CutJudge
from workers.stage.cuts.part import Cuts
from workers.stage.cuts.state import capture
from workers.stage.cuts.validation import Validations
from workers.stage.experts.outside import outside_of
from workers.stage.experts.split import own_optimizer
from workers.stage.report.progress import Progress
from workers.stage.rows.ahead import StageRows
from workers.stage.rows.commits import RowCommits
from workers.stage.running.callbacks import Callbacks, job_callbacks
from workers.stage.running.executor import StageExecutor
from workers.stage.running.following import Following
from workers.stage.running.layers import StageLayers
from workers.stage.running.loggers import job_loggers
from workers.stage.steps.schedule import Schedule
from workers.stage.steps.series import close_series, series_of
from workers.stage.steps.staleness import RowOrder
from workers.stage.steps.stop import Stop
from workers.stage.steps.verdict import AfterStep, LossScales
from workers.stage.update.ending import Ending
from workers.stage.update.loss_terms import LossTerms
from workers.stage.update.update import Update
from workers.stage.update.versions import Versions


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs a share, connected to the other workers and to the shards."""

    client: ParameterClient
    links: Links
    group: StageGroup
    rows: StageRows
    commits: RowCommits
    ending: Ending
    notices: Notices
    executor: StageExecutor
    cuts: Cuts | None
    graph: StageGraph
    versions: Versions
    update: Update
    stop: Stop
    callbacks: Callbacks | None

    def keep(self) -> Beginning:
        """What another generation goes on from, once no step is under way here any more."""
        self.commits.settle()
        progress, following = self.executor.progress, self.executor.following
        step = progress.step
        self.versions.use_newest(step)
        return Beginning(
            step,
            progress.samples,
            self.ending.applied,
            self.ending.scales(step),
            progress.curve.copy(),
            progress.before_s + progress.train_seconds,
            capture(self.graph, self.group, self.update, step, everywhere=True),
            validated=following.validations.done,
            to_validate=following.to_validate,
            committed=self.executor.committed,
            stopped=self.stop.heard,
        )

    def leave(self) -> None:
        """Have the others need nothing more of this worker."""
        self.notices.leave()
        self.links.leave()

    def close(self, *, experts: bool = True) -> None:
        """Leave the others.

        Args:
            experts: whether those out of memory are needed no more; else `close_experts` is due.
        """
        if self.callbacks is not None:
            self.callbacks.end("interrupted")
        self.links.inbox.close()
        if self.cuts is not None:
            self.cuts.close()
        self.ending.close()
        self.commits.close()
        self.rows.close()
        self.notices.close()
        self.links.close()
        self.client.close()
        self.group.close()
        self.update.close()
        if experts:
            self.close_experts()

    def close_experts(self) -> None:
        """Give up experts that are out of memory; safe to repeat."""
        if (outside := outside_of(self.graph.module)) is not None:
            outside.close()


def assemble(
    job: JobSpec,
    place: Place,
    layers: StageLayers,
    links: Links,
    notices: Notices,
    client: ParameterClient,
    schedule: Schedule,
    staleness: int,
    tables: str,
    beginning: Beginning,
    facts: CutFacts,
    cuts: Callable[[], str] | None,
    former: Sequence[int] = (),
    held_out: HeldOut | None = None,
    *,
    over: int = 0,
    lockstep: bool = False,
    logs: str = "",
) -> Parts:
    """The parts of a connected worker, its layers on their device.

    The workers of a stage do it together.

    Args:
        staleness: updates that a step lacks.
        tables: what the names of the job's tables begin with.
        beginning: of the training.
        facts: of the job's cuts.
        cuts: where they lie now; None: none are taken.
        former: the last generation of each attempt before.
        held_out: what is measured; None: it is opened when it is.
        over: how many generations of this attempt none of whose commits is applied any more.
        lockstep: whether the workers of the stage share out experts.
        logs: the folder that directories of loggers are relative to; empty: there is none.

    Raises:
        ModelError: they have made other buffers.
    """
    graph, inbox = layers.graph, links.inbox
    if not (beginning.step or lockstep):  # which has other experts on each
        check_buffers(graph.module, layers.group)
    leads = place.stage == place.rank == 0
    if graph.lookups or leads:  # before there are tables that something late could change
        close_series(client, tables, facts.attempt, former, over, len(facts.layers))
    rows = StageRows(
        graph.module,
        graph.lookups,
        client,
        RowOrder(place, schedule, staleness, beginning.step, notices, inbox),
        lambda step: len(schedule.own(step, place.rank, place.width)),
        layers.staging,
        tables,
        job,
    )
    notices.board.on_notice = rows.pull_waiting
    commits = RowCommits(
        rows,
        client,
        layers.staging,
        tables,
        series_of(tables, facts.attempt, facts.generation, place.stage),
        place.rank,
        place.width,
        staleness,
        measured=job.train.clip > 0,
    )
    versions = Versions(graph.module, staleness)
    update = Update(job, graph.module, layers.group, layers.statistics, schedule, versions)
    progress = Progress()
    taken: Cuts | None = None
    if cuts is not None:
        judge: CutJudge | None = None
        if leads:
            writer = facts.attempt, facts.generation
            folder = CutFolder(cuts, facts.job_id, job, writer, beginning.step)
            stages, steps = len(place.widths), schedule.steps
            judge = CutJudge(facts, folder, stages, client, notices, inbox, steps, progress)
        taken = Cuts(
            place,
            cuts,
            list(facts.layers),
            lambda step: capture(graph, layers.group, update, step),
            commits,
            notices,
            inbox,
            judge,
        )
    stop = Stop(beginning.step if beginning.stopped else None, staleness)
    ending = Ending(
        job,
        place,
        update,
        commits,
        LossScales(layers.precision.loss_scale(), staleness),
        notices,
        inbox,
        schedule.steps,
        staleness,
        LossTerms(place, notices, staleness, beginning.curve.terms),
        stop,
        due=taken.due if taken is not None else lambda step: AfterStep.NOTHING,
        at_once=layers.device.type == "cpu",
    )
    if (state := beginning.state) is not None:
        optimizer = own_optimizer(graph.module, state.optimizer)
        update.resume(beginning.step, beginning.applied, optimizer, state.earlier)
        ending.resume(beginning.step, beginning.applied, beginning.scales)
    callbacks: Callbacks | None = None
    if place.leads and (own := {**job_callbacks(job), **job_loggers(job, logs)}):
        callbacks = Callbacks(
            *(job, facts.job_id, own, graph.module, versions),
            *(schedule, staleness, ending, progress, stop),
        )
    metrics = JobMetrics(job)
    step, again = beginning.step, beginning.to_validate
    known = [one for one in beginning.validated if again and one.step == step]
    following = Following(
        job.train,
        place,
        layers,
        rows,
        versions,
        ending,
        notices,
        inbox,
        metrics,
        schedule.steps,
        staleness,
        progress,
        taken,
        Validations(job.train.validate, [one for one in beginning.validated if one not in known]),
        known,
        callbacks,
        pending=AfterStep.VALIDATE if beginning.to_validate else AfterStep.NOTHING,
    )
    executor = StageExecutor(
        job,
        layers,
        rows,
        place,
        links,
        schedule,
        versions,
        ending,
        staleness,
        beginning,
        progress,
        taken,
        metrics,
        following,
        callbacks,
        held_out or HeldOut(job),
        lockstep=lockstep,
    )
    return Parts(
        *(client, links, layers.group, rows, commits, ending, notices, executor, taken),
        *(graph, versions, update, stop, callbacks),
    )
