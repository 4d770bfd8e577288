"""A worker connected to the others of its job: built once, and anew for each generation."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from protos.naming import KEPT
from protos.stage_pb2 import StageWorkers, Topology
from ps import ParameterClient
from workers.device.copies import staging_for
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
from workers.links.pipeline import Links
from workers.links.ring_port import join_stage
from workers.links.session import Session
from workers.links.transport import Neighbours
from workers.model.module.randomness import Randomness
from workers.model.module.statistics import RunningStatistics
from workers.ops.routed_linear import route
from workers.stage.cuts.judge import CutFacts
from workers.stage.cuts.state import base_names
from workers.stage.experts.split import split_experts
from workers.stage.parts import Parts, assemble
from workers.stage.running.layers import StageLayers
from workers.stage.share import Share

_log = logging.getLogger("heterps.stage")
_SILENCE_S = 30.0  # how long a shard may not answer
_OUTAGE_S = 300.0  # the same of one that its node starts again: it reads what it kept first


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
        from workers.stage.experts.offloading import take_out

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
            share.contents,
        ),
        cuts,
        share.launch.former,
        share.held_out,
        over=0 if topology.donors or topology.HasField("paused") else generation,
        lockstep=bool(split),
        logs="" if output.startswith(KEPT) else str(Path(output).parent),
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
