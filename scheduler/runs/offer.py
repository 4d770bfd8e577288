"""What a job can be planned on now: its types that have live nodes, and its layers' costs there."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import groupby

from protos.decision_pb2 import Resources, ResourceType, Workload
from protos.job_pb2 import JobSpec
from protos.node_pb2 import ProfileReply, ProfileRequest
from protos.scheduler_pb2 import NodeStatus
from scheduler.problem.threads import cut_message
from scheduler.runs.calls import Channels, Stop, call
from scheduler.runs.processes import AttemptId
from scheduler.state.packing import host_of

_PROFILE_TIMEOUT_S = 900.0
_LOOK_TIMEOUT_S = 300.0


class OfferError(ValueError):
    """A job for which there is nothing to plan on."""


class AbsentError(OfferError):
    """There is nothing to plan on now: nodes are missing."""


@dataclass(frozen=True, slots=True)
class Offer:
    """The types a job may use, and those of its resources that it may not.

    Attributes:
        absent: types that no live node has.
        unfit: types whose nodes do not compute in the job's precision.
        small: types of which a node has fewer cores than its units are of, each with such a node
            and what it would have to declare.
    """

    resources: Resources
    absent: tuple[str, ...]
    unfit: tuple[str, ...] = ()
    small: Mapping[str, str] = field(default_factory=dict)

    @property
    def missing(self) -> tuple[str, ...]:
        """All that are not offered."""
        return self.absent + self.unfit + tuple(self.small)

    @property
    def note(self) -> str:
        """Why types are not offered, empty when all are."""
        said = []
        if self.absent:
            names = ", ".join(self.absent)
            said.append(f"not offered, because no node of the type is alive: {names}")
        if self.unfit:
            names = ", ".join(self.unfit)
            said.append(f"not offered, because it does not compute in bf16: {names}")
        if self.small:
            found = ", ".join(f"{name} ({why})" for name, why in self.small.items())
            said.append(f"not offered, because a node has too few cores: {found}")
        return "; ".join(said)


def wanted_types(job: JobSpec) -> list[str]:
    """Names of the types that a job's resources list."""
    return [kind.name for kind in job.schedule.offered.types]


def make_offer(
    job: JobSpec, nodes: Sequence[NodeStatus], threads: Mapping[str, int] | None = None
) -> Offer:
    """Cut a job's resources down to what the live `nodes` have.

    Args:
        threads: of a worker, by type, where a type leaves them open; by default its first.

    Raises:
        OfferError: nothing is left.
    """
    if not job.schedule.offered.types:
        raise OfferError(
            f"job {job.name!r}: schedule.resources: lists no types; expected one or more"
        )
    types, absent, unfit = [], [], []
    small: dict[str, str] = {}
    for kind in job.schedule.offered.types:
        having = [node for node in nodes if node.type == kind.name]
        size = (threads or {}).get(kind.name, kind.threads_any[0]) if kind.threads_any else 1
        units = sum(node.units // size for node in having)
        if not sum(node.units for node in having):
            absent.append(kind.name)
            continue
        if job.train.precision == "bf16" and any(node.without_bf16 for node in having):
            unfit.append(kind.name)
            continue
        if why := _too_small(kind, having) or _too_few(kind, having, size):
            small[kind.name] = why
            continue
        entry = ResourceType()
        entry.CopyFrom(kind)
        entry.node_units = 0  # of a file: nodes' units are what they declare
        if kind.threads_any:
            cut_message(entry, size)
        entry.limit = min(entry.limit, units) if entry.limit else units
        entry.device = kind.device or ("cpu" if kind.name.lower().startswith("cpu") else "cuda")
        entry.emulated = any(node.emulated for node in having)
        entry.units_per_host = _units_per_host(having, size)
        types.append(entry)
    if not types and small:
        raise OfferError(f"schedule.resources: {Offer(Resources(), (), (), small).note}")
    if not types and unfit:
        raise OfferError(
            f"train.precision: 'bf16', which {', '.join(unfit)} does not compute in; expected fp16 "
            "or fp32, or another type in schedule.resources"
        )
    if not types:
        raise AbsentError(f"no node of a type of schedule.resources is alive: {', '.join(absent)}")
    return Offer(Resources(types=types), tuple(absent), tuple(unfit), small)


def _too_small(kind: ResourceType, nodes: Sequence[NodeStatus]) -> str:
    """A node whose units would be of more cores than it has; empty: there is none.

    A node knows nothing of threads: of units of one core it may declare as many as it likes, and
    does declare one a core. Taken for units of several, these would have it compute on several
    times the cores that it has, and a plan promise as much.
    """
    if kind.threads < 2:
        return ""
    for node in nodes:
        if not node.emulated and 0 < node.cores < node.units * kind.threads:
            fitting = node.cores // kind.threads
            return (
                f"threads: {kind.threads}, and node {node.node_id} declares {node.units} such "
                f"units on {node.cores} cores; expected --units {fitting} or fewer"
                if fitting
                else f"threads: {kind.threads}, and node {node.node_id} has {node.cores} cores"
            )
    return ""


def _too_few(kind: ResourceType, nodes: Sequence[NodeStatus], size: int) -> str:
    """Why there is no unit of so many of those that nodes declare; empty: there is one."""
    real = [node for node in nodes if not node.emulated]
    small = next((node for node in real if 0 < node.cores < size), None)
    if size < 2:
        return ""
    if small is not None:
        return f"{size} threads, and node {small.node_id} has {small.cores} cores"
    if 0 < kind.limit < size:
        return f"{size} threads, and the limit is {kind.limit} cores"
    if not any(node.units // size for node in nodes):
        return f"{size} threads, and no node declares so many units"
    return ""


def _units_per_host(nodes: Sequence[NodeStatus], size: int = 1) -> int:
    """Units of the largest host, each of so many that nodes declare; 0 where all are on one."""
    units: Counter[str] = Counter()
    for node in nodes:
        units[host_of(node)] += node.units // size
    return max(units.values()) if len(units) > 1 else 0


def given_workload(job: JobSpec, offer: Offer) -> Workload:
    """The job's own costs, without those on types that are not offered.

    Raises:
        OfferError: a layer, or the parameter server, has no type left.
    """
    return offered(job.schedule.given, offer)


def offered(before: Workload, offer: Offer) -> Workload:
    """A workload without costs on types that are not offered.

    Raises:
        OfferError: a layer, or the parameter server, has no type left.
    """
    workload = Workload()
    workload.CopyFrom(before)
    names = {kind.name for kind in offer.resources.types}
    if workload.ps_type and workload.ps_type in offer.absent:
        raise AbsentError(f"ps_type: no node of type {workload.ps_type!r} is offered")
    if workload.ps_type and workload.ps_type in offer.missing:
        raise OfferError(f"ps_type: {workload.ps_type!r} is not offered; {offer.note}")
    for layer in workload.layers:
        for name in [name for name in layer.cost if name in offer.missing]:
            del layer.cost[name]
        if not layer.cost:
            raise OfferError(
                f"layer {layer.name!r}: no type that may run it is offered; "
                f"offered: {', '.join(sorted(names))}; {offer.note}"
            )
    return workload


def profiling_types(offer: Offer) -> list[str]:
    """The types to measure on: all real ones; an emulated one alone when none is real.

    Emulated types are estimated from a measurement on another type, wherever that is made.
    """
    real = [kind for kind in offer.resources.types if not kind.emulated]
    chosen = real or [offer.resources.types[0]]
    # The first one also tells the parameter server's share, which is a CPU's business.
    return [kind.name for kind in sorted(chosen, key=lambda kind: kind.device != "cpu")]


def look(
    attempt: AttemptId, job: JobSpec, node: NodeStatus, channels: Channels, stop: Stop
) -> Workload:
    """What the job's model says of its plans: its layers, without costs.

    Raises:
        CallError, Interrupted
    """
    request = ProfileRequest(
        job_id=attempt.job_id,
        job=job,
        term=attempt.term,
        attempt=attempt.number,
        token=attempt.token,
        unmeasured=True,
    )
    found: Workload = call(
        channels.node(node.address).Profile,
        request,
        what=f"node {node.node_id} ({node.type} at {node.address}): look at the model",
        timeout_s=_LOOK_TIMEOUT_S,
        retry_s=5.0,
        stop=stop,
    ).workload
    return found


def profile(
    attempt: AttemptId,
    job: JobSpec,
    offer: Offer,
    nodes: Sequence[NodeStatus],
    channels: Channels,
    stop: Stop,
) -> ProfileReply:
    """Measure the job's layers on each of `nodes`; the costs of all types together.

    Nodes on one host take turns, so that they do not disturb each other.

    Raises:
        CallError, Interrupted, OfferError
    """
    measuring = {node.type for node in nodes}

    def measure(node: NodeStatus) -> ProfileReply:
        reply: ProfileReply = call(
            channels.node(node.address).Profile,
            ProfileRequest(
                job_id=attempt.job_id,
                job=job,
                resources=asked_of(offer.resources, node.type, measuring),
                term=attempt.term,
                attempt=attempt.number,
                token=attempt.token,
            ),
            what=f"node {node.node_id} ({node.type} at {node.address}): profile",
            timeout_s=_PROFILE_TIMEOUT_S,
            retry_s=5.0,
            stop=stop,
        )
        return reply

    hosts = [list(group) for _, group in groupby(sorted(nodes, key=host_of), key=host_of)]
    measured: dict[str, ProfileReply] = {}
    with ThreadPoolExecutor(len(hosts)) as pool:
        for found in pool.map(lambda group: [(n.type, measure(n)) for n in group], hosts):
            measured.update(found)
    kept = [reply.kept_at for reply in measured.values() if reply.kept_at]
    workload = merge([(node.type, measured[node.type].workload) for node in nodes])
    return ProfileReply(workload=workload, kept_at=min(kept, default=0.0))


def asked_of(resources: Resources, kind: str, measuring: Collection[str]) -> Resources:
    """The types that one of type `kind` is asked about, where each of `measuring` measures its own.

    What another measures is not to be estimated, which a type without a data sheet cannot be.
    """
    types = [one for one in resources.types if one.name == kind or one.name not in measuring]
    asked = Resources()
    asked.CopyFrom(resources)
    del asked.types[:]
    asked.types.extend(types)
    return asked


def merge(measured: Sequence[tuple[str, Workload]]) -> Workload:
    """Put workloads measured on different types together: each type's costs from its own node.

    Types may be worth having at other micro-batches. All costs become those of the largest: there
    no type takes longer for a sample than in the one that it was measured with. Of what steps take
    besides layers the most counts.

    Raises:
        OfferError: the nodes saw different models.
    """
    base = Workload()
    base.CopyFrom(measured[0][1])
    size = max(workload.reference_batch for _, workload in measured)
    _resize(base, size)
    base.overhead = max(workload.overhead for _, workload in measured)
    for kind, found in measured[1:]:
        names = [layer.name for layer in base.layers]
        if [layer.name for layer in found.layers] != names or found.batch != base.batch:
            raise OfferError(
                f"the node of type {kind!r} measured another model than the one of type "
                f"{measured[0][0]!r}: are the job's files the same on both hosts?"
            )
        other = Workload()
        other.CopyFrom(found)
        _resize(other, size)
        for layer, theirs in zip(base.layers, other.layers, strict=True):
            if kind in theirs.cost:
                layer.cost[kind].CopyFrom(theirs.cost[kind])
        base.linear.extend(one for one in other.linear if one.type == kind)
        base.threads.update(other.threads)
    return base


def with_threads(base: Workload, kind: str, found: Workload) -> Workload:
    """A workload, with the costs of one type as they were measured with other threads.

    Raises:
        OfferError: they are of another model.
    """
    first = Workload()
    first.CopyFrom(base)
    others = [one for one in first.linear if one.type != kind]
    del first.linear[:]
    first.linear.extend(others)
    if kind in first.threads:
        del first.threads[kind]
    measured = (
        name
        for layer in first.layers
        for name, cost in layer.cost.items()
        if not cost.estimated and name != kind
    )
    if not any(measured):  # nothing is left of what was measured so
        first.overhead = 0.0
    return merge([("", first), (kind, found)])


def _resize(workload: Workload, samples: int) -> None:
    """Have costs be of micro-batches of so many samples."""
    times = samples / workload.reference_batch
    for layer in workload.layers:
        more = layer.activation_bytes * workload.reference_batch
        for cost in layer.cost.values():
            for name in ("compute_s", "sync_s", "transfer_s", "delay_s"):
                setattr(cost, name, getattr(cost, name) * times)
            cost.memory_bytes += more * (times - 1)
    workload.reference_batch = samples
