"""The cost model: what an assignment of layers to types with given units takes and costs.

A stage is a run of consecutive layers on one type, maximal unless the type's memory asks for a cut.
With k units its times per sample are
    CT(k) = sum of compute_s * (1 - a + a / k) / B0,
    DT(k) = sum of sync_s * (1 - b + b / k) / B0, plus the same of the last layer's transfer_s
            unless the stage is the final one,
and ET = max(CT, DT). In micro-batches of a share x < 1 of the reference batch a layer's compute_s
has (1 / x - 1) * fixed_s more. Each of CT and DT has the form serial + parallel / k, and that is
how they are held here. What passes at the end of a step while nothing is busy, delay_s, is part of
no ET, only of a step's simulated time. Throughput is the least 1 / ET; the parameter server adds
ceil(throughput * ps_core_s / C) units of its type, of C cores each. Interruptions make all of it
take longer (see `scheduler.problem.interruptions`).
"""

import math
from collections.abc import Mapping, Sequence
from copy import copy
from functools import cached_property
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from scheduler.engine import _planner
from scheduler.problem.allowed import forbid, join, put
from scheduler.problem.footprint import Footprint, fits_disks
from scheduler.problem.interruptions import Expected, Interruptions
from scheduler.problem.plan import Plan, PlanStage
from scheduler.problem.run import Run
from scheduler.problem.steps import Steps
from scheduler.problem.wording import buffers_changed, rate_text
from scheduler.problem.workload import Resources, Workload, check_together

Floats = NDArray[np.float64]

# Measured times do not carry nine digits: a floor missed by less is met.
TOLERANCE = 1e-9


class CostModel:
    """A workload and resources as arrays, [L, T] over layers and types, seconds a sample.

    Args:
        pin: types that layers must run on, by layer name; or one type per layer.
        exclude: types that no layer may run on; the parameter server may.
        max_price_per_hour: dollars an hour that no plan may exceed.
        cuts: whether neighbouring stages may be on one type, where together they exceed its
            memory. By default they may if the workload says what its layers' memory is made of.
        steps: how it is trained, by default as `Steps.of` the workload.
        expected: what searches take for granted of the plan.

    Attributes:
        paid: dollars an hour of a unit, [T].
        price: what searches count it as, interruptions included, and `search_cap` what they hold
            plans to, where `max_price` is what is held to.

    An assignment is a type index a layer. With cuts the index of a type plus the number of types
    stands for the type, too, so that stages side by side can be told apart; without such a sign a
    stage is cut before the layer that no longer fits.

    Raises:
        InputError: workload, resources, pin and exclude do not fit together.
    """

    def __init__(
        self,
        workload: Workload,
        resources: Resources,
        pin: Mapping[str, str] | Sequence[str] | None = None,
        exclude: Sequence[str] = (),
        max_price_per_hour: float = math.inf,
        cuts: bool | None = None,
        steps: Steps | None = None,
        expected: Expected | None = None,
    ) -> None:
        check_together(workload, resources)
        self.workload = workload
        self.resources = resources
        self.types = resources.names
        self.num_layers = len(workload.layers)
        self.num_types = len(self.types)
        self.max_price = max_price_per_hour
        self.paid = np.array([kind.price_per_hour for kind in resources.types])
        self.interruptions = Interruptions.of(resources)
        self.expected = expected or Expected()
        self.price = self.interruptions.prices(self.paid, self.expected)
        self.limit = np.array([kind.limit for kind in resources.types])
        self.capacity = np.array([kind.memory_bytes for kind in resources.types])
        self.samples = workload.samples
        self.on_cores = np.array([kind.is_cpu for kind in resources.types])
        # What is on its way while nobody is busy with it.
        busy_s = 2 * workload.handling_s if self.on_cores.all() else 0.0
        self.way_s = max(0.0, workload.crossing_s - busy_s)
        self.steps = steps or Steps.of(workload)
        self.ps_type = self.types.index(workload.ps_type) if workload.ps_type else 0
        self.ps_unit_s = workload.ps_core_s / resources.types[self.ps_type].cores

        shape = (self.num_layers, self.num_types)
        self.allowed = np.zeros(shape, dtype=bool)
        compute, sync, transfer, a, b, self.memory = (np.zeros(shape) for _ in range(6))
        self.forward_share, self.delay = np.full(shape, 1 / 3), np.zeros(shape)
        fixed = np.zeros(shape)
        for row, layer in enumerate(workload.layers):
            for name, cost in layer.cost.items():
                at = row, self.types.index(name)
                self.allowed[at] = True
                fixed[at] = cost.fixed_s
                compute[at], sync[at], transfer[at] = cost.compute_s, cost.sync_s, cost.transfer_s
                a[at], b[at] = cost.parallel_compute, cost.parallel_sync
                self.memory[at] = cost.memory_bytes
                self.forward_share[at] = cost.forward_share or 1 / 3
                self.delay[at] = cost.delay_s / workload.reference_batch
        self.allowed &= fits_disks(workload, resources)
        batch = workload.reference_batch
        self._computing = compute, fixed, a
        self.compute_serial, self.compute_parallel = self._compute(self.steps.micro_batches)
        self.sync_serial, self.sync_parallel = sync * (1 - b) / batch, sync * b / batch
        self.passing = np.array([layer.passing_s for layer in workload.layers])
        transfer = self._on_the_way(transfer / batch)
        self.transfer_serial, self.transfer_parallel = transfer * (1 - b), transfer * b
        slow = self._host_bandwidth()
        sent = np.array([layer.output_bytes for layer in workload.layers])
        summed = np.array([layer.weight_bytes for layer in workload.layers])
        # There and back; twice round a ring, once a step.
        self.transfer_serial += 2 * sent[:, None] / slow
        self.far = 2 * summed[:, None] / slow / self.steps.batch
        self.near = np.array([kind.units_per_host or np.inf for kind in resources.types])
        self.handled = self._handled(self.steps.micro_batches)
        self.joined = np.array([False, *(layer.uncut for layer in workload.layers[:-1])])
        self.most_units = self._most_units()
        self.footprint = Footprint(workload, resources, self.steps)
        self.most_memory = self.footprint.most(self.memory)
        self.memory, self.held = self.footprint.weighed(self.memory)
        self.cuts = self.footprint.itemized if cuts is None else cuts
        forbid(self.allowed, exclude, self.types)
        put(self.allowed, pin, [layer.name for layer in workload.layers], self.types)
        join(self.allowed, self.joined)

    def _compute(self, micro_batches: int) -> tuple[Floats, Floats]:
        """Serial and parallel seconds a sample in so many micro-batches a step, each [L, T]."""
        compute, fixed, a = self._computing
        batch = self.workload.reference_batch
        if self.steps.staleness is not None:  # else nothing is said of micro-batches
            compute = compute + fixed * max(0.0, batch * micro_batches / self.steps.batch - 1)
        return compute * (1 - a) / batch, compute * a / batch

    def sized(self, micro_batches: int) -> "CostModel":
        """The same, with what layers take in so many micro-batches a step."""
        if not (self._computing[1].any() or self.passing.any()):
            return self
        other = copy(self)
        other.__dict__.pop("native", None)
        other.compute_serial, other.compute_parallel = self._compute(micro_batches)
        other.handled = self._handled(micro_batches)
        return other

    def _handled(self, micro_batches: int) -> Floats:
        """Seconds of a micro-batch that a worker is busy with what passes behind a layer, [L, T].

        That is in stages that end with the layer as in those that begin after it.
        """
        size = self.steps.batch / micro_batches if micro_batches else 0.0
        busy = self.workload.handling_s + self.passing * size
        handled: Floats = np.where(self.on_cores, busy[:, None], 0.0)
        return handled

    def _on_the_way(self, transfer: Floats) -> Floats:
        """What of seconds a sample between stages, [L, T], keeps neither of two workers busy."""
        if self.steps.staleness is None or not self.on_cores.all():
            return transfer
        left: Floats = np.maximum(0.0, transfer - 2 * self.passing[:, None])
        return left

    def _host_bandwidth(self) -> Floats:
        """Bytes a second that pass between two hosts of a type, [T]; infinite where all is one.

        Stages side by side count as on different hosts where a type's units are on several. Units
        of a stage are packed onto as few as can be, so that no more than a host has are on one.
        """
        return np.array(
            [
                (kind.host_bandwidth_bytes_s if kind.units_per_host else 0.0) or np.inf
                for kind in self.resources.types
            ]
        )

    def _most_units(self) -> Floats:
        """Units that a stage with the layer may have, [L, T].

        Those of one host, or one alone, if it must. Beyond the micro-batches that may be under way
        they would have nothing to do.
        """
        most = np.full(
            (self.num_layers, self.num_types),
            self.steps.deepest if self.steps.simulated else np.inf,
        )
        hosts = [kind.units_per_host or np.inf for kind in self.resources.types]
        one_host = [layer.one_host for layer in self.workload.layers]
        most[one_host] = np.minimum(most[one_host], hosts)
        most[[layer.alone for layer in self.workload.layers]] = 1.0
        return most

    @property
    def search_cap(self) -> float:
        """What `price` of all units may come to.

        No plan within the cap is left out, though some may be let in, unless a slowdown or stages
        of one unit are expected: then none is let in.
        """
        sharp = self.expected.slowdown > 1 or self.expected.alone
        if sharp or not self.interruptions.matter:
            return self.max_price
        with np.errstate(divide="ignore", invalid="ignore"):
            more = np.where(self.price > self.paid, self.price / self.paid, 1.0)
        return self.max_price * float(more.max())

    @cached_property
    def native(self) -> _planner.Problem:
        """The same problem for the native solvers: their times are those of the slowdown."""
        slow = self.expected.slowdown
        return _planner.Problem(
            self.allowed,
            self.compute_serial * slow,
            self.compute_parallel * slow,
            self.sync_serial * slow,
            self.sync_parallel * slow,
            self.transfer_serial * slow,
            self.transfer_parallel * slow,
            self.memory,
            self.forward_share,
            self.held,
            self.most_units,
            self.joined,
            self.cuts,
            self.price,
            self.limit.astype(np.float64),
            self.capacity,
            self.samples,
            self.ps_unit_s * slow,
            self.ps_type,
            self.search_cap,
            self.steps.batch,
            self.steps.micro_batches if self.steps.simulated else 0,
            self.steps.staleness or 0,
            self.way_s,
            self.steps.whole_batch,
            self.steps.lockstep,
            self.delay * slow,
            self.handled * slow,
            self.far * slow,
            self.near,
        )

    @property
    def usable(self) -> NDArray[np.bool_]:
        """[L, T]: the type may run the layer and a unit's memory holds it."""
        usable: NDArray[np.bool_] = self.allowed & (self.memory <= self.capacity)
        return usable

    def runs(self, assignment: Sequence[int]) -> list[Run]:
        """Split an assignment (type index per layer) into its stages."""
        kinds, rows = np.array(assignment), np.arange(self.num_layers)
        for row in np.flatnonzero(self.joined):
            kinds[row] = kinds[row - 1]
        starts = np.flatnonzero(np.concatenate([[True], kinds[1:] != kinds[:-1]]))
        kinds %= self.num_types
        if self.cuts:
            split = _planner.split(self.native, [int(code) for code in assignment])
            starts = np.array([first for first, _, _ in split] or starts)
        terms = (
            self.compute_serial,
            self.compute_parallel,
            self.sync_serial,
            self.sync_parallel,
            self.memory,
            self.compute_serial * self.forward_share,
            self.compute_parallel * self.forward_share,
            self.delay,
            self.far,
        )
        sums = [np.add.reduceat(term[rows, kinds], starts).tolist() for term in terms]
        lasts = [*(starts[1:] - 1).tolist(), self.num_layers - 1]
        runs = []
        for n, (first, last) in enumerate(zip(starts.tolist(), lasts, strict=True)):
            kind = int(kinds[first])
            compute, compute_parallel, serial, parallel, memory, *forward, delay, far = (
                each[n] for each in sums
            )
            crossing = crossing_parallel = 0.0
            if last < self.num_layers - 1:
                crossing = float(self.transfer_serial[last, kind])
                crossing_parallel = float(self.transfer_parallel[last, kind])
            run = Run(
                first,
                last,
                kind,
                compute,
                compute_parallel,
                serial + crossing,
                parallel + crossing_parallel,
                memory,
                forward_serial=forward[0],
                forward_parallel=forward[1],
                crossing_serial=crossing,
                crossing_parallel=crossing_parallel,
                delay=delay,
                far=far,
                near=float(self.near[kind]),
            )
            runs.append(run)
        return runs

    @property
    def overfull(self) -> bool:
        """Whether some type's memory may not hold all the layers that it may run."""
        most = np.where(self.allowed, self.most_memory, 0.0)
        return bool((most.sum(axis=0) > self.capacity).any())

    def codes(self, plan: Plan) -> list[int]:
        """The assignment of a plan, with the cuts of its stages."""
        codes = [self.types.index(name) for name in plan.assignment]
        for before, stage in pairwise(plan.stages):
            kind = self.types.index(stage.type)
            if stage.type == before.type and codes[before.first] == kind:
                codes[stage.first : stage.last + 1] = [kind + self.num_types] * (
                    stage.last + 1 - stage.first
                )
        return codes

    def throughput(self, busy_s: Floats, floor: float) -> Floats:
        """Return samples/s where the slowest stage takes `busy_s`; just below `floor` is it."""
        rate = 1.0 / busy_s
        return np.where((rate < floor) & (rate >= floor * (1 - TOLERANCE)), floor, rate)

    def ps_units(self, throughput: Floats) -> Floats:
        """Return the parameter server's units at `throughput`."""
        return np.ceil(throughput * self.ps_unit_s)

    def why_impossible(self, assignment: Sequence[int], runs: Sequence[Run]) -> str:
        """Say why no number of units makes `assignment` run, or return nothing."""
        layers = self.workload.layers
        for run in runs:
            for row in range(run.first, run.last + 1):
                if self.allowed[row, run.type]:
                    continue
                kind = run.type
                return f"layer {layers[row].name!r} may not run on {self.types[kind]}"
        for run in runs:
            if run.memory_bytes > self.capacity[run.type]:
                name = self.types[run.type]
                return (
                    f"layers {layers[run.first].name!r} to {layers[run.last].name!r} need "
                    f"{run.memory_bytes:.3g} bytes, a unit of {name} has "
                    f"{self.capacity[run.type]:.3g}"
                )
        for kind, name in enumerate(self.types):
            stages = sum(run.type == kind for run in runs)
            if stages > self.limit[kind]:
                return f"{stages} stages on {name}, limit {self.limit[kind]} units"
        return ""

    def _why_too_many(self, runs: Sequence[Run], units: Sequence[int]) -> str:
        """Say which stage has more units than it may, or other ones, or return nothing."""
        parts = self.steps.micro_batches
        together = self.steps.simulated and self.steps.lockstep
        for run, number in zip(runs, units, strict=True):
            first, last = (self.workload.layers[row].name for row in (run.first, run.last))
            most = self.most_of(run)
            if number > most:
                layers = self.workload.layers[run.first : run.last + 1]
                alone = [layer.name for layer in layers if layer.alone]
                why = f": {buffers_changed(alone)}" if alone else ""
                return f"layers {first!r} to {last!r} have {number} units, and use {most:.0f}{why}"
            if together and parts % number:
                return (
                    f"layers {first!r} to {last!r} have {number} units, to which {parts} "
                    "micro-batches are not dealt evenly"
                )
        return ""

    def most_of(self, run: Run) -> float:
        """Units that a stage may have, whatever there are of its type."""
        return float(self.most_units[run.first : run.last + 1, run.type].min())

    def handled_s(self, run: Run) -> float:
        """Seconds of a micro-batch that its worker is busy for the stages beside its own."""
        beside = [run.first - 1] * (run.first > 0) + [run.last] * (run.last < self.num_layers - 1)
        return float(self.handled[beside, run.type].sum())

    def slowest_s(self, runs: Sequence[Run], units: Sequence[int]) -> float:
        """Seconds a sample of the slowest stage: max ET."""
        return max(max(r.compute_s(k), r.transfer_s(k)) for r, k in zip(runs, units, strict=True))

    def step_s(
        self, runs: Sequence[Run], units: Sequence[int], steps: Steps, slowest: float
    ) -> float:
        """Simulated seconds of a step, no stage of which takes over `slowest` s a sample."""
        stages = [
            run.stepped(number, steps, self.handled_s(run))
            for run, number in zip(runs, units, strict=True)
        ]
        least, way = slowest * steps.batch, self.way_s
        parts, lacking = steps.micro_batches, steps.staleness or 0
        delays = [run.delay * steps.batch for run in runs]
        return _planner.step_seconds(stages, parts, lacking, least, way, steps.whole_batch, delays)

    def evaluate(
        self,
        assignment: Sequence[int],
        units: Sequence[int],
        floor: float = 0.0,
        rate: float = math.inf,
    ) -> Plan:
        """Price an assignment (type index per layer) with given units, one number a stage.

        Args:
            rate: samples/s that it does not exceed.
        """
        runs = self.runs(assignment)
        names = tuple(self.types[r.type] for r in runs for _ in range(r.first, r.last + 1))
        problem = self.why_impossible(assignment, runs)
        if problem:
            return Plan(False, problem, names, (), 0, 0.0, 0.0, math.inf)
        busy = [max(r.compute_s(k), r.transfer_s(k)) for r, k in zip(runs, units, strict=True)]
        pace = max([*busy, 1 / rate])
        if self.steps.simulated:
            pace = max(pace, self.step_s(runs, units, self.steps, pace) / self.steps.batch)
        lost, of_stages = 0.0, [(run.type, k) for run, k in zip(runs, units, strict=True)]
        if self.interruptions.matter:
            ps_units = int(self.ps_units(self.throughput(np.array(pace), floor)))
            lost = self.interruptions.lost_share(of_stages, self.ps_type, ps_units)
            floor *= 1 + lost
        throughput = float(self.throughput(np.array(pace), floor))
        ps_units = int(self.ps_units(np.array(throughput)))
        total = np.zeros(self.num_types)
        for kind, number in of_stages:
            total[kind] += number
        total[self.ps_type] += ps_units
        price = float(total @ self.paid)
        over = np.flatnonzero(total > self.limit)
        if over.size:
            kind = over[0]
            problem = f"{total[kind]:.0f} units of {self.types[kind]}, limit {self.limit[kind]}"
        elif price > self.max_price * (1 + TOLERANCE):
            problem = f"${price:,.2f} an hour, the cap is ${self.max_price:,.2f}"
        elif throughput < floor:
            reached = rate_text(throughput / (1 + lost), down=True)
            problem = f"reaches {reached} samples/s, the floor is {rate_text(floor / (1 + lost))}"
        if self.steps.simulated:
            problem = self.footprint.why_overfull(runs, units, self.steps) or problem
        problem = self._why_too_many(runs, units) or problem
        stages = tuple(
            PlanStage(
                run.first,
                run.last,
                self.types[run.type],
                int(number),
                run.compute_s(number),
                run.transfer_s(number),
                run.memory_bytes,
                bottleneck=spent == max(busy),
                threads=self.resources.types[run.type].threads,
            )
            for run, number, spent in zip(runs, units, busy, strict=True)
        )
        cost = self.samples / throughput / 3600 * price * (1 + lost)
        return Plan(
            not problem, problem, names, stages, ps_units, throughput, price, cost, lost_share=lost
        )
