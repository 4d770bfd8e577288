"""What one worker is made of: its share of the model and data, then the parts that run it."""

import logging
import os
import threading
from dataclasses import dataclass

import torch

from chassis.security import is_loopback
from protos.naming import table_prefix
from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import StageWorkers, Topology
from ps import ParameterClient
from workers.data import Dataset, GlobalBatches
from workers.device.copies import staging_for
from workers.device.units import VISIBLE
from workers.learning.precision import Precision
from workers.links.all_reduce import Rendezvous, StageGroup
from workers.links.combine import Combiner, Hub, hosts_of
from workers.links.inbox import Inbox
from workers.links.notices import NoticeBoard, Notices
from workers.links.outbox import Outbox
from workers.links.pipeline import Links, Place
from workers.links.transport import Neighbours
from workers.model.entry import job_model
from workers.model.trace import LayerInfo, StageGraph, TracedModel
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
            RuntimeError: its GPU is not there.
        """
        job, plan = launch.job, launch.stages[launch.index]
        place = Place(launch.index, launch.rank, tuple(stage.units for stage in launch.stages))
        device = _device(launch)
        precision = Precision.of(job.train.precision, device)
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        traced = TracedModel(job_model(job))
        batches = GlobalBatches.of(job, Dataset.of(job, "train"))
        schedule = Schedule(
            batches.steps,
            batches.samples,
            micro_batches_of(launch),
            lockstep=place.widths if job.train.split_experts else (),
        )
        return Share(
            launch,
            place,
            device,
            precision,
            traced.layers,
            traced.stage(plan.first, plan.last),
            batches,
            schedule,
            staleness_of(launch),
        )


def micro_batches_of(launch: LaunchRequest) -> int:
    """Micro-batches of a step: the job's, else the plan's, else enough to have all workers busy."""
    widths = [stage.units for stage in launch.stages]
    few = widths[0] if len(widths) == 1 else max(4, *widths)
    return launch.job.train.micro_batches or launch.micro_batches or few


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
    hub: Hub,
    rendezvous: Rendezvous | None,
    stop: threading.Event,
) -> Parts:
    """Connect a worker; all workers of a stage do it together.

    Args:
        inbox: where frames for this worker arrive.
        board: where notices do.
        hub: where sums of workers on several hosts meet, at rank 0.
        rendezvous: rank 0's own; None elsewhere.
    """
    job, place, device = share.launch.job, share.place, share.device
    durable = job.servers.durability not in ("", "none")
    client = ParameterClient(list(topology.shards), timeout_s=_OUTAGE_S if durable else _SILENCE_S)
    staging = staging_for(device)

    def outbox(stage: int) -> Outbox | None:
        if not 0 <= stage < len(topology.stages):
            return None
        addresses = topology.stages[stage].addresses
        return Outbox(Neighbours(addresses, f"stage {stage}", place.rank), staging)

    links = Links(inbox, outbox(place.stage - 1), outbox(place.stage + 1))
    own = topology.stages[place.stage]
    combiner = _combiner(own, place.rank, hub, stop)
    group = StageGroup(place.rank, len(own.addresses), own.rendezvous, rendezvous, device, combiner)
    module = share.graph.module.to(device)
    split = split_experts(module, group) if job.train.split_experts else []
    if split:
        _log.info("experts of %s are split over %d workers", ", ".join(split), group.size)
    notices = Notices(
        (place.stage, place.rank), [stage.addresses for stage in topology.stages], board
    )
    staleness, schedule = share.staleness, share.schedule
    order = RowOrder(place, schedule, staleness, notices, inbox)
    rows = StageRows(
        module,
        share.graph.keys_of,
        client,
        order,
        lambda step: len(schedule.own(step, place.rank, place.width)),
        staging,
        share.tables,
        job.servers,
    )
    board.on_notice = rows.pull_waiting
    layers = StageLayers(share.graph, rows, group, device, staging, share.precision)
    versions = Versions(module, staleness)
    update = Update(job, module, group, schedule.steps, versions)
    commits = RowCommits(
        rows,
        client,
        staging,
        share.tables,
        f"{share.tables}{place.stage}",
        place.rank,
        place.width,
        measured=job.train.clip > 0,
    )
    ending = Ending(
        job,
        place,
        update,
        commits,
        LossScales(share.precision.loss_scale(), staleness),
        notices,
        inbox,
        schedule.steps,
        staleness,
        at_once=device.type == "cpu",
    )
    executor = StageExecutor(
        job, layers, place, links, schedule, versions, ending, staleness, lockstep=bool(split)
    )
    return Parts(client, links, group, rows, commits, ending, notices, executor)


def _combiner(own: StageWorkers, rank: int, hub: Hub, stop: threading.Event) -> Combiner | None:
    """What sums among workers on several hosts; None where torch.distributed may."""
    store, _, _ = own.rendezvous.rpartition(":")
    if len(hosts_of(list(own.addresses))) == 1 or not is_loopback(store):
        return None
    return Combiner(rank, own.addresses[0], None if rank else hub, stop.is_set)


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
