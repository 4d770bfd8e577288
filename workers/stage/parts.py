"""What one worker is made of: its share of the model and data, then the parts that run it."""

import logging
import os
import threading
from dataclasses import dataclass

import torch

from protos.naming import table_prefix
from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import StageWorkers, Topology
from ps import ParameterClient
from workers.data import Dataset
from workers.device.copies import staging_for
from workers.device.units import VISIBLE
from workers.learning.precision import Precision
from workers.links.all_reduce import (
    Rendezvous,
    StageGroup,
    join_processes,
    processes_allowed,
)
from workers.links.inbox import Inbox
from workers.links.outbox import Outbox
from workers.links.pipeline import Links, Place
from workers.links.ring_port import RingPort, join_stage
from workers.links.transport import Neighbours
from workers.model.entry import job_model
from workers.model.trace import LayerInfo, StageGraph, TracedModel
from workers.stage.executor import StageExecutor
from workers.stage.experts import split_experts
from workers.stage.layers import StageLayers
from workers.stage.rows import StageRows
from workers.stage.schedule import Schedule
from workers.stage.staleness import StalenessBound
from workers.stage.update import Update

_log = logging.getLogger("heterps.stage")
_SILENCE_S = 30.0  # how long a shard may not answer
_OUTAGE_S = 300.0  # the same of one that its node starts again: it reads what it kept first


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker is to compute; needs nobody else.

    Args:
        layers: of the whole model.
        graph: the stage's, on the host.
    """

    launch: LaunchRequest
    place: Place
    device: torch.device
    precision: Precision
    layers: tuple[LayerInfo, ...]
    graph: StageGraph
    dataset: Dataset
    schedule: Schedule

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
        precision = Precision.of(job.train.precision, device, stages=len(launch.stages))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        traced = TracedModel(job_model(job))
        dataset = Dataset.of(job, "train")
        return Share(
            launch,
            place,
            device,
            precision,
            traced.layers,
            traced.stage(plan.first, plan.last),
            dataset,
            Schedule.of(job, dataset, place.widths),
        )


@dataclass(frozen=True, slots=True)
class Parts:
    """What runs a share, connected to the other workers and to the shards."""

    client: ParameterClient
    links: Links
    group: StageGroup
    rows: StageRows
    executor: StageExecutor

    def close(self) -> None:
        """Leave the others."""
        self.rows.close()
        self.links.close()
        self.client.close()
        self.group.close()


def build(
    share: Share,
    topology: Topology,
    inbox: Inbox,
    port: RingPort | None,
    rendezvous: Rendezvous | None,
    stop: threading.Event,
) -> Parts:
    """Connect a worker; all workers of a stage do it together.

    Args:
        inbox: where frames for this worker arrive.
        port: where the worker before this one in the stage connects; None: it is alone.
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
    group = _group(share, own, port, rendezvous, stop)
    module = share.graph.module.to(device)
    split = split_experts(module, group) if job.train.split_experts else []
    if split:
        _log.info("experts of %s are split over %d workers", ", ".join(split), group.size)
    bound = StalenessBound(job.train.staleness, stop, ordered=place.stage == 0)
    rows = StageRows(module, share.graph.lookups, client, bound, staging, share.tables, job.servers)
    layers = StageLayers(share.graph, rows, group, device, staging, share.precision)
    update = Update(job, module, group, share.schedule.steps, share.precision)
    executor = StageExecutor(
        job, layers, place, links, share.schedule, update, stop, lockstep=bool(split)
    )
    return Parts(client, links, group, rows, executor)


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
