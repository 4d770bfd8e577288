"""What one worker is made of: its share of the model and data, then the parts that run it."""

import logging
import os
import threading
from dataclasses import dataclass

import torch

from protos.job_pb2 import JobSpec
from protos.naming import table_prefix
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
    processes_allowed,
)
from workers.links.inbox import Inbox
from workers.links.notices import NoticeBoard, Notices
from workers.links.outbox import Outbox
from workers.links.pipeline import Links, Place
from workers.links.ring_port import RingPort, join_stage
from workers.links.transport import Neighbours
from workers.model.entry import job_model
from workers.model.probe import check_parameters, micro_batches_of
from workers.model.randomness import Randomness
from workers.model.statistics import RunningStatistics
from workers.model.trace import LayerInfo, StageGraph, TracedModel
from workers.model.whole import check_smallest
from workers.stage.commits import RowCommits
from workers.stage.ending import Ending
from workers.stage.executor import StageExecutor
from workers.stage.experts import split_experts
from workers.stage.layers import StageLayers
from workers.stage.rows import StageRows
from workers.stage.schedule import Schedule
from workers.stage.staleness import RowOrder
from workers.stage.update import Update
from workers.stage.verdict import LossScales
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

    @property
    def tables(self) -> str:
        """What the names of the job's tables begin with."""
        return table_prefix(self.launch.job_id)

    @staticmethod
    def of(launch: LaunchRequest) -> "Share":
        """The share of a launched worker; makes its device the process's current one.

        Raises:
            ModelError, DataError, PrecisionError: the job does not fit.
            UnfitPlanError: the plan is one of another model.
            RuntimeError: its GPU is not there.
        """
        job, plan = launch.job, launch.stages[launch.index]
        place = Place(launch.index, launch.rank, tuple(stage.units for stage in launch.stages))
        device = _device(launch)
        precision = Precision.of(job.train.precision, device)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        traced = TracedModel(job_model(job))
        names = [layer.name for layer in traced.layers]
        if names != list(launch.layers):
            raise UnfitPlanError(
                f"{job.model.entry}: its layers are {', '.join(names)}; expected those that were "
                f"planned, {', '.join(launch.layers)}"
            )
        if place.stage == place.rank == 0:  # held-out splits, too, before anything is trained
            check_all(job)
            check_parameters(traced, job)
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
        return Share(
            launch,
            place,
            device,
            precision,
            traced.layers,
            traced.stage(plan.first, plan.last),
            batches,
            schedule,
            fixed > 0,
            staleness_of(launch),
        )


def planned_micro_batches(launch: LaunchRequest) -> int:
    """Micro-batches of a step by the plan, where it says none enough to have all workers busy."""
    widths = [stage.units for stage in launch.stages]
    few = widths[0] if len(widths) == 1 else max(4, *widths)
    return launch.micro_batches or few


def staleness_of(launch: LaunchRequest) -> int:
    """Updates that a step lacks: the plan's, else the job's; none where experts are split."""
    if launch.job.train.split_experts:
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

    def close(self) -> None:
        """Leave the others."""
        self.links.inbox.close()
        self.ending.close()
        self.commits.close()
        self.rows.close()
        self.notices.close()
        self.links.close()
        self.client.close()
        self.group.close()


def build(
    share: Share,
    topology: Topology,
    inbox: Inbox,
    board: NoticeBoard,
    port: RingPort | None,
    rendezvous: Rendezvous | None,
    stop: threading.Event,
) -> Parts:
    """Connect a worker; all workers of a stage do it together.

    Args:
        inbox: where frames for this worker arrive.
        board: where notices do.
        port: where the worker before this one in the stage connects; None: it is alone.
        rendezvous: rank 0's own; None elsewhere.
    """
    job, place, device = share.launch.job, share.place, share.device
    durable = job.servers.durability not in ("", "none")
    client = ParameterClient(list(topology.shards), timeout_s=_OUTAGE_S if durable else _SILENCE_S)
    staging = staging_for(device)
    here = topology.stages[place.stage].addresses[place.rank].rpartition(":")[0]

    def outbox(stage: int) -> Outbox | None:
        if not 0 <= stage < len(topology.stages):
            return None
        addresses = topology.stages[stage].addresses
        return Outbox(Neighbours(addresses, f"stage {stage}", place.rank, here), staging)

    links = Links(inbox, outbox(place.stage - 1), outbox(place.stage + 1))
    own = topology.stages[place.stage]
    group = _group(share, own, port, rendezvous, stop)
    module = share.graph.module.to(device)
    split = split_experts(module, group) if job.train.split_experts else []
    if split:
        _log.info("experts of %s are split over %d workers", ", ".join(split), group.size)
    notices = Notices(
        (place.stage, place.rank), [stage.addresses for stage in topology.stages], board
    )
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
        lockstep=bool(split),
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
    *,
    lockstep: bool = False,
) -> Parts:
    """The parts of a connected worker, its layers on their device.

    Args:
        staleness: updates that a step lacks.
        tables: what the names of the job's tables begin with.
        lockstep: whether the workers of the stage share out experts.
    """
    graph, inbox = layers.graph, links.inbox
    rows = StageRows(
        graph.module,
        graph.lookups,
        client,
        RowOrder(place, schedule, staleness, notices, inbox),
        lambda step: len(schedule.own(step, place.rank, place.width)),
        layers.staging,
        tables,
        job.servers,
    )
    notices.board.on_notice = rows.pull_waiting
    commits = RowCommits(
        rows,
        client,
        layers.staging,
        tables,
        f"{tables}{place.stage}",
        place.rank,
        place.width,
        measured=job.train.clip > 0,
    )
    versions = Versions(graph.module, staleness)
    ending = Ending(
        job,
        place,
        Update(job, graph.module, layers.group, layers.statistics, schedule, versions),
        commits,
        LossScales(layers.precision.loss_scale(), staleness),
        notices,
        inbox,
        schedule.steps,
        staleness,
        at_once=layers.device.type == "cpu",
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
        lockstep=lockstep,
    )
    return Parts(client, links, layers.group, rows, commits, ending, notices, executor)


def _group(
    share: Share,
    own: StageWorkers,
    port: RingPort | None,
    rendezvous: Rendezvous | None,
    stop: threading.Event,
) -> StageGroup:
    """The workers of the stage, with collectives of torch's where they are of use and allowed."""
    if port is None:
        return StageGroup(share.device)
    wanted = share.device.type == "cuda" or share.launch.job.train.split_experts
    has_processes = wanted and processes_allowed(own.addresses, own.rendezvous)
    if has_processes:
        join_processes(port.rank, port.size, own.rendezvous, rendezvous, share.device)
    ring = join_stage(port, own.addresses, stop.is_set)
    return StageGroup(share.device, ring, has_processes=has_processes)


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
