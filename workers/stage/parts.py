"""What one worker is made of: its share of the model and data, then the parts that run it."""

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from protos.job_pb2 import JobSpec
from protos.naming import KEPT, table_prefix
from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import StageWorkers, Topology
from ps import ParameterClient
from workers.data import Dataset, GlobalBatches
from workers.data.check import check_all
from workers.device.copies import staging_for
from workers.device.units import VISIBLE
from workers.errors import UnfitPlanError
from workers.learning.precision import Precision
from workers.links.all_reduce import (
    Rendezvous,
    StageGroup,
    join_processes,
    leave_processes,
    processes_allowed,
    wait_for_all,
)
from workers.links.notices import Notices
from workers.links.outbox import Outbox
from workers.links.pipeline import Links, Place
from workers.links.ring_port import join_stage
from workers.links.session import Session
from workers.links.transport import Neighbours
from workers.model.chain.compiled import compile_layers
from workers.model.chain.trace import LayerInfo, StageGraph, TracedModel
from workers.model.checks.graph import check_graph
from workers.model.checks.objective import check_loss, check_metrics
from workers.model.checks.probe import check_parameters, micro_batches_of
from workers.model.code.entry import job_model
from workers.model.module.inputs import inputs_of
from workers.model.module.randomness import Randomness
from workers.model.module.statistics import RunningStatistics
from workers.model.module.whole import check_smallest
from workers.model.objective.metrics import JobMetrics
from workers.model.saved.warm_start import Weights, give_weights, read_weights
from workers.ops.linear import Routes, of_type, route
from workers.stage.beginning import Beginning, beginning_of
from workers.stage.callbacks import Callbacks, job_callbacks
from workers.stage.commits import RowCommits
from workers.stage.cut_folder import CutFolder
from workers.stage.cut_judge import CutFacts, CutJudge
from workers.stage.cuts import Cuts
from workers.stage.ending import Ending
from workers.stage.executor import StageExecutor
from workers.stage.experts import own_optimizer, split_experts
from workers.stage.following import Following
from workers.stage.layers import StageLayers
from workers.stage.loggers import job_loggers
from workers.stage.loss_terms import LossTerms
from workers.stage.outside import built_in, folder_of, outside_of
from workers.stage.progress import Progress
from workers.stage.rows import StageRows
from workers.stage.schedule import Schedule
from workers.stage.series import close_series, series_of
from workers.stage.staleness import RowOrder
from workers.stage.state import base_names, capture, give
from workers.stage.stop import Stop
from workers.stage.update import Update
from workers.stage.validation import Validations
from workers.stage.verdict import AfterStep, LossScales
from workers.stage.versions import Versions

_log = logging.getLogger("heterps.stage")
_SILENCE_S = 30.0  # how long a shard may not answer
_OUTAGE_S = 300.0  # the same of one that its node starts again: it reads what it kept first


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker is to compute; needs nobody else.

    Args:
        layers: of the whole model.
        graph: the stage's, on the host.
        fixed: whether the job, not the plan, fixes the number of micro-batches.
        staleness: updates that a step lacks.
        beginning: of the training; the graph's layers are as they are then.
        routes: of products of the stage's `nn.Linear`, as of the decision.
        weights: that the job's own training begins with.
        folder: for experts that lie out of memory; None: all are in it.
        rooms: bytes of memory for those of each layer.
    """

    launch: LaunchRequest
    place: Place
    device: torch.device
    precision: Precision
    layers: tuple[LayerInfo, ...]
    graph: StageGraph
    batches: GlobalBatches
    schedule: Schedule
    fixed: bool
    staleness: int
    routes: Routes
    beginning: Beginning
    weights: Weights | None
    folder: Path | None
    rooms: Mapping[str, int]

    @property
    def tables(self) -> str:
        """What the names of the job's tables begin with."""
        return table_prefix(self.launch.job_id)

    @staticmethod
    def of(launch: LaunchRequest, *, anew: bool = False) -> "Share":
        """The share of a launched worker; makes its device the process's current one.

        Args:
            anew: of another generation, which `begun` tells where to begin.

        Raises:
            ModelError, DataError, PrecisionError: the job does not fit.
            UnfitPlanError: the plan is one of another model, or computes layers as is not possible
                here.
            RuntimeError: its GPU is not there.
        """
        job, plan = launch.job, launch.stages[launch.index]
        place = Place(launch.index, launch.rank, tuple(stage.units for stage in launch.stages))
        device = _device(launch)
        precision = Precision.of(job.train.precision, device)
        routes = Routes(of_type(job.train.routes, plan.type) if device.type == "cpu" else ())
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        folder = folder_of(job)
        with built_in(folder):
            traced = TracedModel(job_model(job), inputs_of(job.data))
        names = [layer.name for layer in traced.layers]
        rooms: Mapping[str, int] = {}
        if folder is not None:
            from workers.offload.training.suited import check_suited, rooms_of

            check_suited(job, traced.model, names)
            rooms = rooms_of(job, traced.model)
        if names != list(launch.layers):
            raise UnfitPlanError(
                f"{job.model.entry}: its layers are {', '.join(names)}; expected those that were "
                f"planned, {', '.join(launch.layers)}"
            )
        first = place.stage == place.rank == 0 and not anew
        if first:  # held-out splits, too, before anything is trained
            check_all(job)
            check_parameters(traced, job)
            check_graph(traced, job)
            check_loss(traced, job)
            check_metrics(traced, job)
        batches = GlobalBatches.of(job, Dataset.of(job, "train"))
        fixed = micro_batches_of(job, traced)
        schedule = Schedule(
            batches.steps,
            batches.samples,
            fixed or planned_micro_batches(launch),
            lockstep=place.widths if job.train.split_experts else (),
        )
        if batches.steps and not schedule.lockstep:
            last = min(batches.steps_per_epoch or batches.steps, batches.steps) - 1
            check_smallest(traced.model, batches.samples(last) // schedule.count(last))
        weights: Weights | None = None
        if job.train.warm_start and not launch.resume:
            weights = read_weights(job.train.warm_start)
            give_weights(traced.model, weights, base_names(names), tell=first)
        compile_layers(traced, job.train.compile)
        graph, staleness = traced.stage(plan.first, plan.last), staleness_of(launch)
        beginning = Beginning()
        if not anew:
            beginning = beginning_of(
                launch, graph, staleness, weights, place=launch.resume, folder=folder
            )
        batches.go_on(beginning.position)
        return Share(
            launch,
            place,
            device,
            precision,
            traced.layers,
            graph,
            batches,
            schedule,
            fixed > 0,
            staleness,
            routes,
            beginning,
            weights,
            folder,
            rooms,
        )

    def begun(self, kept: Beginning | None, place: str) -> "Share":
        """The same with the state that a worker has kept; None: with that of the cut at `place`."""
        if kept is None:
            beginning = beginning_of(
                *(self.launch, self.graph, self.staleness, self.weights),
                place=place,
                folder=self.folder,
            )
            self.batches.go_on(beginning.position)
            return replace(self, beginning=beginning)
        assert kept.state is not None
        give(self.graph, kept.state)
        return replace(self, beginning=kept)


def planned_micro_batches(launch: LaunchRequest) -> int:
    """Micro-batches of a step by the plan, where it says none enough to have all workers busy."""
    widths = [stage.units for stage in launch.stages]
    few = widths[0] if len(widths) == 1 else max(4, *widths)
    return launch.micro_batches or few


def staleness_of(launch: LaunchRequest) -> int:
    """Updates that a step lacks: the plan's, else the job's.

    None where experts are split, or out of memory.
    """
    if launch.job.train.split_experts or launch.job.train.offload.memory:
        return 0
    return launch.staleness if launch.HasField("staleness") else launch.job.train.staleness


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


def build(
    share: Share,
    topology: Topology,
    session: Session,
    rendezvous: Rendezvous | None,
    cuts: Callable[[], str] | None,
) -> Parts:
    """Connect a worker; all workers of a stage do it together.

    Args:
        session: where frames and notices for this worker arrive.
        rendezvous: rank 0's own; None elsewhere.
        cuts: where the job's cuts lie now; None: none are taken.
    """
    with ExitStack() as opened:  # to be closed where what follows cannot be
        parts = _connected(share, topology, session, rendezvous, cuts, opened)
        opened.pop_all()
    return parts


def _connected(
    share: Share,
    topology: Topology,
    session: Session,
    rendezvous: Rendezvous | None,
    cuts: Callable[[], str] | None,
    opened: ExitStack,
) -> Parts:
    job, place, device = share.launch.job, share.place, share.device
    output = share.launch.output
    inbox, generation = session.inbox, session.generation
    durable = job.servers.durability not in ("", "none")
    client = ParameterClient(
        list(topology.shards),
        timeout_s=_OUTAGE_S if durable else _SILENCE_S,
        wire=job.servers.wire or "float32",
    )
    opened.callback(client.close)
    session.on_back(client.abort)
    staging = staging_for(device)
    here = topology.stages[place.stage].addresses[place.rank].rpartition(":")[0]

    def called_away() -> bool:
        return inbox.stopped

    def outbox(stage: int) -> Outbox | None:
        if not 0 <= stage < len(topology.stages):
            return None
        addresses = topology.stages[stage].addresses
        to = Neighbours(addresses, f"stage {stage}", place.rank, here, generation, called_away)
        made = Outbox(to, staging)
        opened.callback(made.close)
        return made

    links = Links(inbox, outbox(place.stage - 1), outbox(place.stage + 1))
    own = topology.stages[place.stage]
    group = _group(share, own, session, rendezvous)
    opened.callback(group.close)
    module = share.graph.module.to(device)
    route(module, share.routes)
    split = split_experts(module, group) if job.train.split_experts else []
    if split:
        _log.info("experts of %s are split over %d workers", ", ".join(split), group.size)
    if share.folder is not None:
        from workers.stage.offloading import take_out

        begun = share.beginning
        kept = begun.state.optimizer if begun.state is not None else {}
        steps = share.schedule.steps
        outside = take_out(
            *(job, module, group, device, share.folder, share.rooms),
            *(steps, begun.step, begun.applied, kept),
        )
        if outside is not None:
            opened.callback(outside.close)
    notices = Notices(
        (place.stage, place.rank),
        [stage.addresses for stage in topology.stages],
        session.board,
        generation,
        called_away,
    )
    opened.callback(notices.close)
    return assemble(
        job,
        place,
        StageLayers(
            share.graph,
            group,
            device,
            staging,
            share.precision,
            Randomness(module, job.train.seed, fixed=share.fixed),
            RunningStatistics(module, place.width),
        ),
        links,
        notices,
        client,
        share.schedule,
        share.staleness,
        share.tables,
        share.beginning,
        CutFacts(
            share.launch.job_id,
            job,
            share.launch.attempt,
            base_names(layer.name for layer in share.layers),
            share.staleness,
            share.schedule.micro_batches,
            share.tables,
            generation,
            share.batches.position,
        ),
        cuts,
        share.launch.former,
        over=0 if topology.donors or topology.HasField("paused") else generation,
        lockstep=bool(split),
        logs="" if output.startswith(KEPT) else str(Path(output).parent),
    )


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
    *,
    over: int = 0,
    lockstep: bool = False,
    logs: str = "",
) -> Parts:
    """The parts of a connected worker, its layers on their device.

    Args:
        staleness: updates that a step lacks.
        tables: what the names of the job's tables begin with.
        beginning: of the training.
        facts: of the job's cuts.
        cuts: where they lie now; None: none are taken.
        former: the last generation of each attempt before.
        over: how many generations of this attempt none of whose commits is applied any more.
        lockstep: whether the workers of the stage share out experts.
        logs: the folder that directories of loggers are relative to; empty: there is none.
    """
    graph, inbox = layers.graph, links.inbox
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
        lockstep=lockstep,
    )
    return Parts(
        *(client, links, layers.group, rows, commits, ending, notices, executor, taken),
        *(graph, versions, update, stop, callbacks),
    )


def _group(
    share: Share,
    own: StageWorkers,
    session: Session,
    rendezvous: Rendezvous | None,
) -> StageGroup:
    """The workers of the stage, with collectives of torch's where they are of use and allowed."""
    port, inbox = session.port, session.inbox
    if port is None:
        return StageGroup(share.device)
    wanted = share.device.type == "cuda" or share.launch.job.train.split_experts
    ring = join_stage(port, own.addresses, lambda: inbox.stopped, session.generation)
    has_processes = wanted and processes_allowed(own.addresses, own.rendezvous)
    if not has_processes:
        return StageGroup(share.device, ring)
    try:
        leave_processes()  # of a generation that was not whole
        wait_for_all(ring)  # nobody who joins torch's processes can be called away
        join_processes(
            *(port.rank, port.size, own.rendezvous, rendezvous, share.device, session.generation)
        )
    except BaseException:
        ring.close()
        raise
    return StageGroup(share.device, ring, has_processes=True)


def _device(launch: LaunchRequest) -> torch.device:
    """The device of this worker, made the process's current one: nodes let it see its GPU alone."""
    if not launch.devices or launch.devices[launch.index] != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"stage {launch.index} was planned for a GPU, and PyTorch {torch.__version__} finds "
            f"none ({VISIBLE}={os.environ.get(VISIBLE, 'unset')})"
        )
    device = torch.device("cuda", launch.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # what NCCL's barriers go by
    return device
