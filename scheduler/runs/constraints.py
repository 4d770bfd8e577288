"""What workers would refuse, or do otherwise than a plan says, known before there is a plan.

Each constraint is written into the workload that is planned, where the planner has a field for it,
and told in a sentence that goes into the decision.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from protos.decision_pb2 import Decision, LinearRoute, Workload
from protos.job_pb2 import JobSpec
from protos.losses import of_whole_batches
from protos.scheduler_pb2 import NodeStatus
from scheduler.problem.wording import buffers_changed, listed
from scheduler.runs.offer import OfferError
from scheduler.state.packing import host_of

_AT_ONCE = (
    "The loss is one of whole batches: no backward of a step begins before all of its forwards, "
    "and each worker keeps what all of its micro-batches need."
)
_TOGETHER = (
    "Workers that share out experts compute together: all forwards of a step before its backwards, "
    "and in each stage but the last a worker keeps what all of its micro-batches need."
)


@dataclass(frozen=True, slots=True)
class Constrained:
    """A workload with what a job and its model demand of a plan, and why, in sentences."""

    workload: Workload
    notes: tuple[str, ...] = ()


def of_job(workload: Workload, job: JobSpec, nodes: Sequence[NodeStatus]) -> Constrained:
    """What the job file alone demands.

    Args:
        nodes: the live ones.
    """
    found, notes = Workload(), []
    found.CopyFrom(workload)
    train = job.train
    found.batch = train.batch_size
    if train.micro_batches:
        found.micro_batches = min(train.micro_batches, train.batch_size)
        notes.append(
            f"A step has {_times(found.micro_batches, 'micro-batch')}: train.micro_batches says so."
        )
    elif found.micro_batches and not job.schedule.given.layers:
        notes.append(_fixed(found.micro_batches))
    found.whole_batch = found.whole_batch or of_whole_batches(job)
    if found.whole_batch:
        notes.append(_AT_ONCE)
    found.lockstep = train.split_experts
    found.copied = found.copied or copies_state(job)
    # Workers in lockstep end each step, and experts out of memory have one version.
    most = 0 if train.split_experts or train.offload.memory else train.staleness
    found.staleness = min(most, found.staleness) if found.HasField("staleness") else most
    if train.split_experts and not all(node.plain_collectives for node in nodes):
        split = [layer for layer in found.layers if layer.kind == "moe"]
        for layer in split:
            layer.one_host = True
        if split:
            names = listed([layer.name for layer in split])
            notes.append(
                f"The workers of a stage with {names} are on one host: train.split_experts sends "
                "samples between them."
            )
    if train.offload.memory and (held := _keep_to_cores(found, job)):
        notes.append(
            f"{listed(held)} run on CPU cores: train.offload has experts of theirs on disk."
        )
    keep_linear(found, job.train.routes)
    if train.linear != "auto":
        del found.linear[:]
    if found.linear:
        notes.append(_linear(found))
    if found.lockstep:
        notes.append(_TOGETHER)
    if alone := [layer.name for layer in found.layers if layer.alone]:
        notes.append(_alone(alone))
    return Constrained(found, tuple(notes))


def copies_state(job: JobSpec) -> bool:
    """Whether workers copy their state while they train: for checkpoints, moves, replacements."""
    schedule = job.schedule
    moves = schedule.replan == "auto" or schedule.HasField("elastic")
    return moves or job.retries > 0 or job.train.HasField("checkpoint")


def _keep_to_cores(workload: Workload, job: JobSpec) -> list[str]:
    """Take types of GPUs from layers with experts, where another is left; names of such layers."""
    emulated = set(job.schedule.emulate)
    gpus = {
        kind.name
        for kind in job.schedule.offered.types
        if kind.device == "cuda" and not kind.emulated and kind.name not in emulated
    }
    held = []
    for layer in workload.layers:
        if layer.kind == "moe" and gpus & layer.cost.keys() and not layer.cost.keys() <= gpus:
            for name in gpus & layer.cost.keys():
                del layer.cost[name]
            held.append(layer.name)
    return held


def of_model(
    workload: Workload, job: JobSpec, nodes: Sequence[NodeStatus], seen: Workload
) -> Constrained:
    """What job and model demand.

    Args:
        nodes: the live ones.
        seen: the model's layers, without costs, and how it fixes its micro-batches.

    Raises:
        OfferError: the workload is of other layers.
    """
    found = Workload()
    found.CopyFrom(workload)
    names, own = ([layer.name for layer in one.layers] for one in (found, seen))
    if names != own:
        raise OfferError(
            f"schedule.workload: costs of the layers {listed(names)}; expected those of the model, "
            f"{listed(own)}, in this order"
        )
    for layer, told in zip(found.layers, seen.layers, strict=True):
        if told.kind == "moe":  # which a workload need not say
            layer.kind = told.kind
        layer.uncut = layer.uncut or told.uncut
        layer.shares = layer.shares or told.shares
        layer.alone = layer.alone or told.alone
    constrained = of_job(found, job, nodes)
    found, notes = constrained.workload, list(constrained.notes)
    if seen.whole_batch and not found.whole_batch:
        found.whole_batch = True
        notes.append(_AT_ONCE)
    if seen.micro_batches and seen.micro_batches != found.micro_batches:
        found.micro_batches = seen.micro_batches
        notes.append(_fixed(seen.micro_batches))
    return Constrained(found, tuple(notes))


def keep_linear(workload: Workload, kept: Sequence[LinearRoute]) -> None:
    """Put into a workload what computes `nn.Linear` on types for which that was chosen before."""
    known = {one.type for one in kept}
    new = [one for one in workload.linear if one.type not in known]
    del workload.linear[:]
    workload.linear.extend([*kept, *new])


def _linear(workload: Workload) -> str:
    """What computes `nn.Linear`, in a sentence."""
    routed: dict[tuple[str, str], dict[str, None]] = {}
    for one in workload.linear:
        for product in ("forward", "grad_input", "grad_weight"):
            if (route := getattr(one, product)) != "torch":
                size = f"{one.inputs}x{one.outputs} ({product})"
                routed.setdefault((one.type, route), {})[size] = None
    if not routed:
        return "Products of nn.Linear are PyTorch's own: nothing else was 5 % faster."
    told = [
        f"on {kind} by {route}, {listed(list(sizes))}" for (kind, route), sizes in routed.items()
    ]
    return (
        f"Products of nn.Linear that were measured to be faster so are computed {'; '.join(told)}. "
        "That stays for all of the job; train.linear: torch does without."
    )


def may_depend_on_model(decision: Decision, job: JobSpec) -> bool:
    """Whether what the model demands may change the plan: it has more than one worker.

    Demands of a model only rule plans out, and they rule out no plan of a single worker. Two do:
    that of a loss of the job's own, with which all of a step may have to be in memory, and that of
    experts out of it, which are on no GPU.
    """
    workers = sum(stage.units for stage in decision.stages)
    alone = bool(job.model.loss) or bool(job.train.offload.memory)
    return decision.feasible and (workers > 1 or alone)


def shared_cores(decision: Decision, nodes: Sequence[NodeStatus]) -> list[str]:
    """A sentence for each host whose units are of more cores than it has, of types in the plan."""
    used = {stage.type for stage in decision.stages}
    if decision.ps_units:
        used.add(decision.workload.ps_type)
    units: Counter[str] = Counter()
    wanted: Counter[str] = Counter()
    cores: dict[str, int] = {}
    threads = {
        kind.name: (kind.threads or 1) // (kind.node_units or 1)
        for kind in decision.resources.types
    }
    for node in nodes:
        if node.cores and node.type in used:
            units[host_of(node)] += node.units
            wanted[host_of(node)] += node.units * threads.get(node.type, 1)
            cores[host_of(node)] = node.cores
    return [
        f"Host {host} declares {_times(units[host], 'unit')}{_threads(units[host], wanted[host])} "
        f"on {_times(cores[host], 'core')}: where they compute at the same time they take turns, "
        "and the plan runs slower than predicted."
        for host in sorted(units)
        if wanted[host] > cores[host]
    ]


def _threads(units: int, cores: int) -> str:
    """Of how many threads units are, where some have several."""
    return f" of {_times(cores, 'thread')}" if cores > units else ""


def _alone(names: Sequence[str]) -> str:
    return (
        f"{buffers_changed(names)}, which several workers would have each another one of: "
        f"{'its' if len(names) == 1 else 'their'} stage has one worker."
    )


def _fixed(micro_batches: int) -> str:
    return (
        f"A step has {_times(micro_batches, 'micro-batch')}, whatever the plan: a layer of the "
        "model sees its micro-batch whole; train.micro_batches changes that."
    )


def _times(count: int, thing: str) -> str:
    plural = f"{thing}es" if thing.endswith("ch") else f"{thing}s"
    return f"{count:,} {thing if count == 1 else plural}"
