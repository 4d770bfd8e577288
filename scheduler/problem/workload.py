"""What is planned: a workload's layers with their costs, and the resources with their prices."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from chassis.near import near_or_all
from protos import decision_pb2 as pb
from scheduler.problem.fields import Fields, InputError, read_file, unique
from scheduler.problem.mapper import OPTIONAL, of_message, to_fields, to_json

# Numbers of units are exact in every representation up to here, and beyond what can be rented.
MAX_LIMIT = 1_000_000
MAX_THREADS = 1024
# Of the updates that a step may lack: as many versions of the weights are kept, and one more.
MAX_STALENESS = 1_000


@dataclass(frozen=True, slots=True)
class LayerCost:
    """Cost of one layer on one resource type, on one unit with the reference batch.

    Times are seconds a batch; `parallel_*` is the fraction that divides by the number of units.
    `uncertainty` is the standard deviation of ln(compute_s + sync_s), which is the relative one
    where it is small; 0 where it is not known. `forward_share` is the forward's part of
    `compute_s`, the rest being the backward's; 0 stands for a third. `delay_s` passes at the end of
    a step after its sums, whatever the number of units, while nothing is busy. `fixed_s` is what a
    micro-batch takes whatever its size: one of a share x < 1 of the reference batch computes for
    x * compute_s + (1 - x) * fixed_s.
    """

    compute_s: float
    sync_s: float
    transfer_s: float
    parallel_compute: float
    parallel_sync: float
    memory_bytes: float
    estimated: bool = False
    uncertainty: float = 0.0
    forward_share: float = field(default=0.0, metadata=OPTIONAL)
    delay_s: float = field(default=0.0, metadata=OPTIONAL)
    fixed_s: float = field(default=0.0, metadata=OPTIONAL)

    def slower(self, times: float) -> "LayerCost":
        """The same where it computes for `times` as long."""
        return replace(self, compute_s=self.compute_s * times, fixed_s=self.fixed_s * times)


@dataclass(frozen=True, slots=True)
class Layer:
    """A layer and its cost by resource type; a type that is missing may not run it.

    `weight_bytes` are of its dense parameters, `optimizer_bytes` what their optimizer keeps,
    `activation_bytes` a sample what stays from its forward to its backward, `output_bytes` a
    sample what crosses to the next stage where one ends here. That, and what comes back, keeps a
    worker on a CPU busy on either side for `passing_s` a sample. A layer that is `uncut` is in one
    stage with the layer after it, because of what `shares` says. With `one_host` all units of its
    stage are on one host; one that is `alone` is in a stage of one unit. `disk_bytes` are on the
    disk of each unit: experts out of memory.
    """

    name: str
    kind: str
    cost: Mapping[str, LayerCost]
    weight_bytes: float = field(default=0.0, metadata=OPTIONAL)
    optimizer_bytes: float = field(default=0.0, metadata=OPTIONAL)
    activation_bytes: float = field(default=0.0, metadata=OPTIONAL)
    output_bytes: float = field(default=0.0, metadata=OPTIONAL)
    passing_s: float = field(default=0.0, metadata=OPTIONAL)
    uncut: bool = field(default=False, metadata=OPTIONAL)
    one_host: bool = field(default=False, metadata=OPTIONAL)
    alone: bool = field(default=False, metadata=OPTIONAL)
    shares: str = field(default="", metadata=OPTIONAL)
    disk_bytes: float = field(default=0.0, metadata=OPTIONAL)


@dataclass(frozen=True, slots=True)
class LinearRoute:
    """What computes the products of `nn.Linear` of one size, as measured on a type's unit.

    `forward`, `grad_input` and `grad_weight` are names such as torch, onednn and native, for `rows`
    rows and for numbers that are nearest to it.
    """

    type: str
    rows: int
    inputs: int
    outputs: int
    threads: int
    forward: str
    grad_input: str
    grad_weight: str


@dataclass(frozen=True, slots=True)
class Workload:
    """A model to train: `samples` samples in all, layers in the order they run.

    `batch` is the number of samples a step, 0 where it is not known, and `micro_batches` in how
    many parts a step computes them, 0 where the planner chooses. `staleness` is how many updates a
    step may lack; None where nothing is said of steps, and they are taken to cost nothing besides
    their samples. `overhead` is the share of the time, below 1, that goes to neither computing nor
    waiting, `crossing_s` what a micro-batch takes to the next stage and back besides its layers'
    `transfer_s`, whatever its size, `handling_s` what of a micro-batch keeps a worker on a CPU busy
    for each stage beside its own besides layers' `passing_s`, and `data_bytes` what a host of the
    first stage keeps of the dataset. With `whole_batch` the loss is one of whole batches: no
    backward of a step begins before all of its forwards are done. With `lockstep` workers share out
    experts: so it is in each stage but the last. `copied` says that workers copy what they have of
    weights and optimizer state while they train: for checkpoints, and for whoever takes another's
    place. `linear` is no cost: what the costs of dense layers were measured with.
    `threads` are those of the worker that the costs on a type are of; one where it is not named.
    """

    name: str
    reference_batch: int
    samples: float
    ps_type: str
    ps_core_s: float
    layers: tuple[Layer, ...]
    micro_batches: int = field(default=0, metadata=OPTIONAL)
    staleness: int | None = field(default=None, metadata=OPTIONAL)
    batch: int = field(default=0, metadata=OPTIONAL)
    overhead: float = field(default=0.0, metadata=OPTIONAL)
    data_bytes: float = field(default=0.0, metadata=OPTIONAL)
    crossing_s: float = field(default=0.0, metadata=OPTIONAL)
    handling_s: float = field(default=0.0, metadata=OPTIONAL)
    whole_batch: bool = field(default=False, metadata=OPTIONAL)
    lockstep: bool = field(default=False, metadata=OPTIONAL)
    copied: bool = field(default=False, metadata=OPTIONAL)
    linear: tuple[LinearRoute, ...] = field(default=(), metadata=OPTIONAL)
    threads: Mapping[str, int] = field(default_factory=dict, metadata=OPTIONAL)
    source: str = field(default="", compare=False)

    @classmethod
    def parse(cls, value: object, source: str = "") -> "Workload":
        """Check a parsed workload file.

        Raises:
            InputError: naming `source`, key path, value and what was expected.
        """
        fields = Fields(value, "", source, [key for key in cls.__slots__ if key != "source"])
        ps_type = fields.text("ps_type", default="", allow_empty=True)
        ps_core_s = fields.number("ps_core_s", default=0.0)
        if ps_core_s > 0 and not ps_type:
            raise fields.error("ps_type", "the type that the parameter server runs on")
        layers = tuple(
            _parse_layer(item, f"layers[{index}]", source)
            for index, item in enumerate(fields.items("layers"))
        )
        unique([layer.name for layer in layers], source, "layers")
        if layers[-1].uncut:
            expected = "false for the last layer: there is none after it"
            raise InputError(
                source, f"layers[{len(layers) - 1}].uncut", f"True: expected {expected}"
            )
        batch = fields.integer("batch", 0, 2**32 - 1, default=0)
        micro_batches = fields.integer("micro_batches", 0, 2**32 - 1, default=0)
        if batch and micro_batches > batch:
            raise fields.error("micro_batches", f"at most the samples of a step, {batch}")
        overhead = fields.number("overhead", default=0.0, high=1.0)
        if overhead == 1:
            raise fields.error("overhead", "a number from 0 to below 1")
        return cls(
            name=fields.text("name"),
            reference_batch=fields.integer("reference_batch", 1, 2**32 - 1),
            samples=fields.number("samples", above=True),
            ps_type=ps_type,
            ps_core_s=ps_core_s,
            layers=layers,
            micro_batches=micro_batches,
            staleness=fields.whole_or_none("staleness", 0, MAX_STALENESS),
            batch=batch,
            overhead=overhead,
            data_bytes=fields.number("data_bytes", default=0.0),
            crossing_s=fields.number("crossing_s", default=0.0),
            handling_s=fields.number("handling_s", default=0.0),
            whole_batch=fields.boolean("whole_batch", default=False),
            lockstep=fields.boolean("lockstep", default=False),
            copied=fields.boolean("copied", default=False),
            linear=tuple(
                _parse_route(item, f"linear[{index}]", source)
                for index, item in enumerate(fields.items("linear", least=0))
            ),
            threads=_parse_threads(value, source),
            source=source,
        )

    @classmethod
    def from_message(cls, message: pb.Workload, source: str = "") -> "Workload":
        """Check and convert a message."""
        return cls.parse(of_message(message), source)

    def to_message(self) -> pb.Workload:
        """Return the message of the same content."""
        return pb.Workload(**to_fields(self))

    def to_json(self) -> dict[str, Any]:
        """Return the content of a workload file."""
        return to_json(self)


@dataclass(frozen=True, slots=True)
class ResourceType:
    """A kind of unit that can be rented: a CPU core, a GPU.

    A spot unit is taken away `interruptions_per_hour` times on average. Each time all units of the
    job wait `recovery_s` seconds, and `restart_s` where it was the only one of its stage, the steps
    since the last cut included that are done again; 0: as where there are others. `units_per_host`
    units are on a host, all of them where it is 0, and `host_bandwidth_bytes_s` bytes a second pass
    between two hosts; 0 where that costs no more than within one. A unit of a CPU is `threads`
    cores, on which one worker computes; 0 is one. Price and memory are the unit's. Where
    `threads_any` has numbers, units are cores, and workers have any one of these numbers of them,
    the same in all of a plan. Of the type that it is then planned with, a unit is `node_units` of
    those that nodes declare; 0 is one. A unit has `ssd_bytes` of disk, 0 as many as there are, and
    it moves `ssd_bandwidth` bytes a second, 0 where that is not known.
    """

    name: str
    price_per_hour: float
    limit: int
    memory_bytes: float
    device: str = ""
    flops_per_s: float = 0.0
    memory_bandwidth: float = 0.0
    emulated: bool = False
    interruptions_per_hour: float = 0.0
    recovery_s: float = 0.0
    units_per_host: int = field(default=0, metadata=OPTIONAL)
    host_bandwidth_bytes_s: float = field(default=0.0, metadata=OPTIONAL)
    restart_s: float = field(default=0.0, metadata=OPTIONAL)
    threads: int = field(default=0, metadata=OPTIONAL)
    threads_any: tuple[int, ...] = field(default=(), metadata=OPTIONAL)
    node_units: int = field(default=0, metadata=OPTIONAL)
    ssd_bytes: float = field(default=0.0, metadata=OPTIONAL)
    ssd_bandwidth: float = field(default=0.0, metadata=OPTIONAL)

    @property
    def alone_s(self) -> float:
        """Seconds that all lose where a unit is taken away that was the only one of its stage."""
        return max(self.recovery_s, self.restart_s)

    @property
    def is_sure(self) -> bool:
        """Whether its units are never taken away."""
        return not self.interruptions_per_hour

    @property
    def is_cpu(self) -> bool:
        """Whether a unit is of CPU cores: by `device`, else by the name."""
        return (self.device or self.name).lower().startswith("cpu")

    @property
    def cores(self) -> int:
        """Cores of a unit, where it is of such."""
        return self.threads or 1


@dataclass(frozen=True, slots=True)
class Resources:
    """The resource types on offer."""

    types: tuple[ResourceType, ...]
    source: str = field(default="", compare=False)

    @classmethod
    def parse(cls, value: object, source: str = "") -> "Resources":
        """Check a parsed resources file.

        Raises:
            InputError: naming `source`, key path, value and what was expected.
        """
        fields = Fields(value, "", source, ("types",))
        types = tuple(
            _parse_type(item, f"types[{index}]", source)
            for index, item in enumerate(fields.items("types"))
        )
        unique([kind.name for kind in types], source, "types")
        if sum(bool(kind.threads_any) for kind in types) > 1:
            raise InputError(source, "types", "threads_any: expected at most one type with it")
        return cls(types, source)

    @classmethod
    def from_message(cls, message: pb.Resources, source: str = "") -> "Resources":
        """Check and convert a message."""
        return cls.parse(of_message(message), source)

    def to_message(self) -> pb.Resources:
        """Return the message of the same content."""
        return pb.Resources(**to_fields(self))

    def to_json(self) -> dict[str, Any]:
        """Return the content of a resources file."""
        return to_json(self)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the types, in the order of the file."""
        return tuple(kind.name for kind in self.types)


def _parse_layer(value: object, path: str, source: str) -> Layer:
    fields = Fields(value, path, source, Layer.__slots__)
    costs = fields.mapping("cost", "resource types to costs")
    return Layer(
        name=fields.text("name"),
        kind=fields.text("kind", default="", allow_empty=True),
        cost={name: _parse_cost(costs[name], f"{path}.cost.{name}", source) for name in costs},
        weight_bytes=fields.number("weight_bytes", default=0.0),
        optimizer_bytes=fields.number("optimizer_bytes", default=0.0),
        activation_bytes=fields.number("activation_bytes", default=0.0),
        output_bytes=fields.number("output_bytes", default=0.0),
        passing_s=fields.number("passing_s", default=0.0),
        uncut=fields.boolean("uncut", default=False),
        one_host=fields.boolean("one_host", default=False),
        alone=fields.boolean("alone", default=False),
        shares=fields.text("shares", default="", allow_empty=True),
        disk_bytes=fields.number("disk_bytes", default=0.0),
    )


def _parse_cost(value: object, path: str, source: str) -> LayerCost:
    fields = Fields(value, path, source, tuple(LayerCost.__slots__))
    return LayerCost(
        compute_s=fields.number("compute_s"),
        sync_s=fields.number("sync_s"),
        transfer_s=fields.number("transfer_s"),
        parallel_compute=fields.number("parallel_compute", high=1.0),
        parallel_sync=fields.number("parallel_sync", high=1.0),
        memory_bytes=fields.number("memory_bytes"),
        estimated=fields.boolean("estimated", default=False),
        uncertainty=fields.number("uncertainty", default=0.0),
        forward_share=fields.number("forward_share", default=0.0, high=1.0),
        delay_s=fields.number("delay_s", default=0.0),
        fixed_s=fields.number("fixed_s", default=0.0),
    )


def _parse_route(value: object, path: str, source: str) -> LinearRoute:
    fields = Fields(value, path, source, tuple(LinearRoute.__slots__))
    return LinearRoute(
        type=fields.text("type"),
        rows=fields.integer("rows", 1, 2**32 - 1),
        inputs=fields.integer("inputs", 1, 2**32 - 1),
        outputs=fields.integer("outputs", 1, 2**32 - 1),
        threads=fields.integer("threads", 1, 2**32 - 1),
        forward=fields.text("forward"),
        grad_input=fields.text("grad_input"),
        grad_weight=fields.text("grad_weight"),
    )


def _parse_threads(value: object, source: str) -> Mapping[str, int]:
    given = value.get("threads", {}) if isinstance(value, Mapping) else {}
    if not isinstance(given, Mapping):
        raise InputError(source, "threads", f"{given!r}: expected a mapping of types to threads")
    fields = Fields(given, "threads", source, list(given))
    return {name: fields.integer(name, 1, MAX_THREADS) for name in given}


def _threads_any(fields: Fields) -> Iterator[int]:
    for one in fields.items("threads_any", least=0):
        if isinstance(one, bool) or not isinstance(one, int) or not 1 <= one <= MAX_THREADS:
            raise fields.error("threads_any", f"whole numbers from 1 to {MAX_THREADS}")
        yield one


def _parse_type(value: object, path: str, source: str) -> ResourceType:
    fields = Fields(value, path, source, tuple(ResourceType.__slots__))
    device = fields.text("device", default="", allow_empty=True)
    if device not in ("", "cpu", "cuda"):
        raise fields.error("device", "cpu or cuda")
    found = ResourceType(
        name=fields.text("name"),
        price_per_hour=fields.number("price_per_hour"),
        limit=fields.integer("limit", 1, MAX_LIMIT),
        memory_bytes=fields.number("memory_bytes"),
        device=device,
        flops_per_s=fields.number("flops_per_s", default=0.0),
        memory_bandwidth=fields.number("memory_bandwidth", default=0.0),
        emulated=fields.boolean("emulated", default=False),
        interruptions_per_hour=fields.number("interruptions_per_hour", default=0.0),
        recovery_s=fields.number("recovery_s", default=0.0),
        units_per_host=fields.integer("units_per_host", 0, MAX_LIMIT, default=0),
        host_bandwidth_bytes_s=fields.number("host_bandwidth_bytes_s", default=0.0),
        restart_s=fields.number("restart_s", default=0.0),
        threads=fields.integer("threads", 0, MAX_THREADS, default=0),
        threads_any=tuple(_threads_any(fields)),
        node_units=fields.integer("node_units", 0, MAX_THREADS, default=0),
        ssd_bytes=fields.number("ssd_bytes", default=0.0),
        ssd_bandwidth=fields.number("ssd_bandwidth", default=0.0),
    )
    if found.threads_any and (found.threads or found.node_units or not found.is_cpu):
        raise fields.error("threads_any", "a CPU type, device: cpu, without threads of its own")
    if found.node_units not in (0, found.threads):
        raise fields.error("node_units", "as many as threads")
    if found.cores > 1 and not found.is_cpu:
        raise fields.error("threads", "1 of a type that is no CPU; of a CPU say device: cpu")
    return found


def check_together(workload: Workload, resources: Resources) -> None:
    """Refuse a workload that names types which `resources` lacks, or that takes no time at all.

    Raises:
        InputError: naming the workload's file, key path, value and the nearest valid name.
    """
    names = resources.names
    where = resources.source or "the resources"
    if workload.ps_type and workload.ps_type not in names:
        problem = f"{workload.ps_type!r}: expected a type of {where}"
        raise InputError(
            workload.source,
            "ps_type",
            problem + near_or_all(workload.ps_type, names),
        )
    for index, layer in enumerate(workload.layers):
        for name in layer.cost:
            if name not in names:
                problem = f"{name!r}: expected a type of {where}{near_or_all(name, names)}"
                raise InputError(workload.source, f"layers[{index}].cost", problem)
    for kind in resources.types:
        told = workload.threads.get(kind.name, 1)
        if told != kind.cores and any(kind.name in layer.cost for layer in workload.layers):
            raise InputError(
                workload.source,
                f"threads.{kind.name}",
                f"the costs are of a worker with {told}: expected {kind.cores}, as {where} says; "
                "a type's times change with its threads",
            )
    least = [
        min(cost.compute_s + cost.sync_s for cost in layer.cost.values())
        for layer in workload.layers
    ]
    if not math.fsum(least) > 0:
        problem = "expected a layer with compute_s or sync_s above 0 on each of its types"
        raise InputError(workload.source, "layers", problem)


def load_workload(path: str | Path) -> Workload:
    """Read and check a workload file (JSON or YAML)."""
    return Workload.parse(read_file(path), str(path))


def load_resources(path: str | Path) -> Resources:
    """Read and check a resources file (JSON or YAML)."""
    return Resources.parse(read_file(path), str(path))
