"""Putting a planned job on nodes: shards first, then stage workers, then the word to start."""

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from chassis.channels import connect, showing
from protos.decision_pb2 import Decision
from protos.job_pb2 import JobSpec
from protos.naming import KEPT, cuts_of, table_prefix
from protos.node_pb2 import SHARD, STAGE, LaunchReply, LaunchRequest, StopJobRequest
from protos.parameter_server_pb2 import DropTablesRequest
from protos.parameter_server_pb2_grpc import ParameterServerStub
from protos.scheduler_pb2 import (
    END_INVALID_JOB,
    END_NO_CAPACITY,
    NodeStatus,
)
from protos.stage_pb2 import StageWorkers, Topology
from protos.stage_pb2_grpc import StageStub
from scheduler.runs.beginning import taken_over
from scheduler.runs.calls import CallError, Channels, Interrupted, Stop, call
from scheduler.runs.failures import JobError, ending_of_call
from scheduler.runs.processes import AttemptId, Process, other_contents
from scheduler.state.endings import Ending
from scheduler.state.nodes import Nodes
from scheduler.state.packing import Group

T = TypeVar("T")
_LAUNCH_TIMEOUT_S = 240.0
_START_TIMEOUT_S = 20.0
_BEGIN_TIMEOUT_S = 120.0  # on a host whose cores are all busy with starting
_PARALLEL = 16  # on each node


def groups_of(decision: Decision) -> list[Group]:
    """The units of each stage, which work together."""
    layers = decision.workload.layers
    return [
        Group(
            stage.type,
            stage.units,
            one_host=any(layer.one_host for layer in layers[stage.first : stage.last + 1]),
            follows=number > 0,
        )
        for number, stage in enumerate(decision.stages)
    ]


def shards_of(
    decision: Decision, count: int, standing: Sequence[NodeStatus]
) -> tuple[list[Group], list[str]]:
    """The units that the decision's shards take; none where shards stand.

    Args:
        count: of shards; 0 for one a unit.

    Returns:
        Groups of units, each of one shard's host; then the types of units that may be anywhere.
    """
    if standing:
        return [], []
    kind = decision.workload.ps_type
    shares = split_units(count, decision.ps_units)
    return (
        [Group(kind, share, one_host=True) for share in shares if share > 1],
        [kind for share in shares if share == 1],
    )


def split_units(count: int, units: int) -> list[int]:
    """How many of the units each shard has, the most first; shards beyond share those."""
    homes = min(count or units, units)
    return [units // homes + (index < units % homes) for index in range(homes)]


def place(
    attempt: AttemptId,
    job: JobSpec,
    decision: Decision,
    units: Sequence[NodeStatus],
    standing: Sequence[NodeStatus],
    nodes: Nodes,
) -> list[Process]:
    """Give every process of the job a node.

    Args:
        units: the node of each reserved unit: the stages' in order, then the shards'.
        standing: the shards that stand; without any the job gets its own.

    Raises:
        JobError: there are fewer standing shards than the job asks for, or no node at all.
    """
    shards = place_shards(attempt, job, decision, units, standing, nodes)
    return [*shards, *workers_of(attempt, decision, units)]


def workers_of(
    attempt: AttemptId, decision: Decision, units: Sequence[NodeStatus], generation: int = 0
) -> list[Process]:
    """The workers of all stages; not started yet.

    Args:
        units: the node of each, in order.
    """
    places = [(i, rank) for i, stage in enumerate(decision.stages) for rank in range(stage.units)]
    return [
        worker_of(attempt, index, rank, node, generation)
        for (index, rank), node in zip(places, units, strict=False)
    ]


def worker_of(
    attempt: AttemptId,
    index: int,
    rank: int,
    node: NodeStatus,
    generation: int = 0,
    *,
    shares: bool = False,
) -> Process:
    """A worker of a stage; not started yet.

    Args:
        shares: it has no unit of its own there.
    """
    name = f"stage {index} worker {rank}"
    return replace(_process(attempt, name, STAGE, index, node, generation, rank), shares=shares)


def shard_of(attempt: AttemptId, index: int, node: NodeStatus, generation: int = 0) -> Process:
    """A shard of the job's own, or a standing one; not started yet.

    Args:
        generation: of the workers, that it is started for in the place of another.
    """
    return _process(attempt, f"shard {index}", SHARD, index, node, generation)


def launch(
    attempt: AttemptId,
    job: JobSpec,
    decision: Decision,
    processes: Sequence[Process],
    scheduler: str,
    channels: Channels,
    stop: Stop,
    resume: str = "",
    generation: int = 0,
    former: Sequence[int] = (),
) -> list[Process]:
    """Start those processes that have no address yet, at once, and wait until each listens.

    Args:
        processes: all of the job.
        resume: folder or URL of the cut that they go on from; empty for none.
        generation: of the workers that are started.
        former: the last generation of each attempt before.

    Returns:
        The processes with their addresses and process ids, in the same order.

    Raises:
        JobError: one did not start, or reads other data than the others; all are given up.
        Interrupted: `stop` said so.
    """
    failed: list[Ending] = []
    base = LaunchRequest(
        job_id=attempt.job_id,
        attempt=attempt.number,
        term=attempt.term,
        job=job,
        stages=decision.stages,
        layers=[layer.name for layer in decision.workload.layers],
        devices=devices_of(decision),
        scheduler=scheduler,
        output=output_of(attempt.job_id, job, scheduler),
        micro_batches=decision.micro_batches,
        staleness=decision.staleness if decision.HasField("staleness") else None,
        resume=resume,
        generation=generation,
        former=former,
        token=attempt.token,
    )
    base.cuts = cuts_of(base.output)
    del base.job.train.routes[:]
    if base.job.train.linear == "auto":
        base.job.train.routes.extend(decision.workload.linear)
    base.job.train.warm_start = (
        "" if resume else taken_over(attempt.job_id, job.train.warm_start, scheduler)
    )

    # What the job left open is settled now: every process reads the same.
    shards = [process for process in processes if process.role == SHARD]
    base.job.servers.shards = len(shards)
    if not base.job.servers.durability:
        base.job.servers.durability = _durability(shards)

    def start(process: Process) -> Process | None:
        if process.address:
            return process
        if process.standing:
            return _started(process, LaunchReply(address=process.node.address))
        request = LaunchRequest()
        request.CopyFrom(base)
        request.process_id, request.role = process.process_id, process.role  # type: ignore[assignment]
        request.index, request.rank = process.index, process.rank
        node = process.node
        try:
            reply: LaunchReply = call(
                channels.node(node.address).Launch,
                request,
                what=f"node {node.node_id} at {node.address}: start {process.label}",
                timeout_s=_LAUNCH_TIMEOUT_S,
                retry_s=3.0,
                stop=lambda: stop() or bool(failed),
            )
        except CallError as error:
            where = f"({process.label}: {process.place})"
            failed.append(ending_of_call(error, process.label, f"node {node.node_id}", where))
            return None
        except Interrupted:
            return None
        return _started(process, reply)

    started = _by_node(start, processes)
    if failed:
        raise JobError(failed[0])
    if stop():
        raise Interrupted
    listening = [process for process in started if process is not None]
    if text := other_contents(listening, job.data):
        raise JobError(Ending(END_INVALID_JOB, text, error=text))
    return listening


def begin(
    attempt: AttemptId,
    processes: Sequence[Process],
    channels: Channels,
    stop: Stop,
    topology: Topology | None = None,
    retry_s: float = 3.0,
) -> None:
    """Tell every stage worker where the others are: training begins.

    Args:
        topology: what to tell; of a first generation unless given.
        retry_s: for how long one that cannot be reached is tried again.

    Raises:
        CallError, Interrupted
    """
    topology = topology or topology_of(attempt.job_id, processes)
    workers = [process for process in processes if process.role == STAGE]

    def tell(worker: Process) -> None:
        call(
            StageStub(channels.to(worker.address, attempt.token)).Start,
            topology,
            what=f"{worker.label} at {worker.address} ({worker.place}): start",
            timeout_s=_BEGIN_TIMEOUT_S,
            retry_s=retry_s,
            stop=stop,
        )

    try:
        _by_node(tell, workers)
    finally:
        for worker in workers:
            channels.forget(worker.address)


def _by_node(work: Callable[[Process], T], processes: Sequence[Process]) -> list[T]:
    """What `work` gives of each process, a few of each node at a time."""
    pools: dict[str, ThreadPoolExecutor] = {}
    with ExitStack() as stack:
        futures = []
        for process in processes:
            if (node := process.node.address) not in pools:
                pools[node] = stack.enter_context(ThreadPoolExecutor(_PARALLEL))
            futures.append(pools[node].submit(work, process))
        return [future.result() for future in futures]


def stop_job(
    attempt: AttemptId,
    addresses: Sequence[str],
    channels: Channels,
    grace_s: float,
    only: Sequence[Process] = (),
    unfinished: str = "",
    came_to: float = 0.0,
) -> dict[str, str]:
    """Stop this attempt, and those before it, on the nodes; by address why one did not.

    Args:
        only: stop these alone, of an attempt that goes on.
        unfinished: where its model was to lie, of an attempt of which nothing runs any more.
        came_to: measured over predicted throughput; 0: not known.
    """
    job_id = attempt.job_id
    silent: dict[str, str] = {}

    def tell(address: str) -> None:
        try:
            call(
                channels.node(address).StopJob,
                StopJobRequest(
                    job_id=job_id,
                    grace_s=grace_s,
                    term=attempt.term,
                    attempt=attempt.number,
                    processes=[p.process_id for p in only if p.node.address == address],
                    unfinished=unfinished,
                    came_to=came_to,
                ),
                what=f"node at {address}: stop job {job_id}",
                timeout_s=grace_s + 5.0,
                stop=lambda: False,
            )
        except CallError as error:
            silent[address] = str(error)

    if addresses:
        with ThreadPoolExecutor(_PARALLEL) as pool:
            list(pool.map(tell, sorted(set(addresses))))
    return silent


def drop_tables(job_id: str, shards: Sequence[str], token: str = "") -> list[str]:
    """Free what a job keeps on shards; those that did not answer.

    Args:
        token: that they ask for; empty for the cluster's.
    """
    silent: list[str] = []
    for address in shards:
        # Jobs that end together share a shard: none may close the channel of another.
        with connect(address, showing(token)) as channel:
            try:
                call(
                    ParameterServerStub(channel).DropTables,
                    DropTablesRequest(prefix=table_prefix(job_id)),
                    what=f"shard at {address}: drop the tables of {job_id}",
                    timeout_s=_START_TIMEOUT_S,
                    retry_s=2.0,
                    stop=lambda: False,
                )
            except CallError as error:
                silent.append(str(error))
    return silent


def topology_of(job_id: str, processes: Sequence[Process]) -> Topology:
    """Who listens where."""
    topology = Topology(job_id=job_id)
    for process in processes:
        if process.role == SHARD:
            topology.shards.append(process.address)
            continue
        while len(topology.stages) <= process.index:
            topology.stages.append(StageWorkers())
        stage = topology.stages[process.index]
        stage.addresses.append(process.address)
        if process.rank == 0:
            stage.rendezvous = process.rendezvous
    return topology


def output_of(job_id: str, job: JobSpec, scheduler: str) -> str:
    """Where the job's model is saved: an absolute folder, or with the scheduler."""
    if not job.output:
        return f"{KEPT}{scheduler}/{job_id}"
    return os.path.normpath(Path(job.directory or "/") / job.output / job_id)


def place_shards(
    attempt: AttemptId,
    job: JobSpec,
    decision: Decision,
    units: Sequence[NodeStatus],
    standing: Sequence[NodeStatus],
    nodes: Nodes,
    generation: int = 0,
) -> list[Process]:
    """Give the shards of a job their nodes; not started yet.

    Args:
        units, standing: as of `place`.
        generation: of the workers that they are started for in the place of others.

    Raises:
        JobError: as of `place`.
    """
    count = job.servers.shards
    if standing:
        count = count or len(standing)
        if count > len(standing):
            text = (
                f"servers.shards: {count}, but {len(standing)} standing shards are alive; "
                "expected at most as many"
            )
            raise JobError(Ending(END_INVALID_JOB, text, error=text))
        homes = list(standing)
        if job.servers.durability == "none":
            homes = [_keeping_nothing(status) for status in standing]
    else:
        # The shards' own units come behind the stages'; a plan without any still needs a home.
        position = sum(stage.units for stage in decision.stages)
        homes = []
        for share in split_units(count, decision.ps_units):
            homes.append(units[position])
            position += share
        homes = homes or [any_home(decision, nodes)]
        count = count or len(homes)
    return [
        shard_of(attempt, index, homes[index % len(homes)], generation) for index in range(count)
    ]


def _keeping_nothing(shard: NodeStatus) -> NodeStatus:
    """A standing shard as a job without durability sees it, whatever it keeps for others."""
    copy = NodeStatus()
    copy.CopyFrom(shard)
    copy.keeps_rows = False
    return copy


def any_home(decision: Decision, nodes: Nodes, avoid: Collection[str] = ()) -> NodeStatus:
    """The best node for a shard that has no unit of its own.

    Args:
        avoid: ids of nodes that are none.

    Raises:
        JobError: there is none.
    """
    live = [node for node in nodes.placeable() if node.node_id not in avoid]
    if not live:
        text = "no node is alive to run the parameter server on"
        raise JobError(Ending(END_NO_CAPACITY, text, error=text))
    ps_type = decision.workload.ps_type

    def fitness(node: NodeStatus) -> tuple[bool, bool, int]:
        return node.type == ps_type, node.type.lower().startswith("cpu"), node.units

    return max(live, key=fitness)


def devices_of(decision: Decision) -> list[str]:
    """Where the workers of each stage compute: "cpu" | "cuda"."""
    kinds = {kind.name: kind for kind in decision.resources.types}
    devices = []
    for stage in decision.stages:
        kind = kinds[stage.type]
        devices.append("cpu" if kind.emulated or kind.device != "cuda" else "cuda")
    return devices


def _durability(shards: Sequence[Process]) -> str:
    """Where the job does not say: a node starts a shard of its own again, so it keeps a log.

    A standing one does where whoever started it gave it a place for that.
    """
    return "none" if any(shard.standing and not shard.returns for shard in shards) else "log"


def _process(
    attempt: AttemptId,
    name: str,
    role: int,
    index: int,
    node: NodeStatus,
    generation: int,
    rank: int = 0,
) -> Process:
    """One with an id that is unique over all attempts at all jobs, and all their generations."""
    again = f".{attempt.number}" if attempt.number > 1 else ""
    later = f".g{generation}" if generation else ""
    return Process(
        process_id=f"{attempt.job_id}.{name.replace(' ', '-')}{again}{later}",
        label=name + (f", generation {generation}" if generation else ""),
        role=role,
        index=index,
        rank=rank,
        node=node,
    )


def _started(process: Process, reply: LaunchReply) -> Process:
    return replace(process, **{field.name: value for field, value in reply.ListFields()})
