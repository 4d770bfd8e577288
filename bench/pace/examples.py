"""Real jobs on more units than this machine has: one stage computes, the others sleep.

A job of `examples/` is profiled here, cut into stages at random, and given as many units as let one
of the stages be the slowest. That one computes, on one unit; every layer of the others sleeps, and
gives zeros of the right shape: for what it was measured to take, less what is still computed around
it. It has no rows then and next to no weights, so nothing is priced for moving these. Processes,
messages, and the rows and sums of the stage that computes are those of the real job, and what was
promised for it can be held against what it does.
"""

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.json_format import MessageToDict
from torch import Tensor, nn

from bench.pace.besides import time_besides
from bench.pace.questions import TYPES, UNITS, micro_batches_of
from bench.pages import ROOT
from heterps.job.file import load_job
from heterps.job.prepare import data_path, prepare
from heterps.profiling.measure import Settings, profile
from protos.decision_pb2 import Resources
from protos.job_pb2 import JobSpec
from scheduler import Workload, plan
from scheduler.decision.record import Decision
from workers.data import Dataset, GlobalBatches
from workers.data.tensors import tensors_of
from workers.model.code.entry import job_model

JOBS = {
    "flights": "examples/flights/job.yaml",
    "kuairand": "examples/kuairand/job.yaml",
    "ctrdnn": "examples/heterps_paper/ctrdnn.yaml",
    "moe-lm": "examples/moe_lm/job.yaml",
}
_DRAWS = 1000
_UNREACHABLE = 1e15  # samples/s
_STAGES = (2, 4)
_MODEL = Path(__file__).with_name("paced_model.py")


@dataclass(frozen=True, slots=True)
class Form:
    """What a module gives: `times` the samples, each of a shape; and takes, `samples_of` times."""

    shape: list[int]
    times: float
    samples_of: float


@dataclass(frozen=True, slots=True)
class Profiled:
    """A job with its costs on a core here, and what its modules give, by name.

    Args:
        name: of `JOBS`.
        times: what its own batch is multiplied by.
    """

    name: str
    times: int
    job: JobSpec
    workload: Mapping[str, Any]
    forms: Mapping[str, Form]

    @property
    def seconds(self) -> tuple[float, ...]:
        """A sample takes in each layer."""
        reference = self.workload["reference_batch"]
        return tuple(
            layer["cost"]["cpu"]["compute_s"] / reference for layer in self.workload["layers"]
        )

    @property
    def executor_s(self) -> float:
        """A micro-batch takes besides its layers, as far as these are what bounds it."""
        share = self.workload.get("overhead", 0.0)
        return share / (1 - share) * sum(self.seconds) * self.workload["reference_batch"]


@dataclass(frozen=True, slots=True)
class Cut:
    """A profiled job cut into stages with units; `computing` is the stage that does not sleep."""

    name: str
    of: Profiled
    cuts: tuple[int, ...]  # the last layer of each stage
    units: tuple[int, ...]
    computing: int
    staleness: int
    method: str = "exact"
    seed: int = 0
    floor: float = 0.0

    @property
    def batch(self) -> int:
        """Samples a step."""
        return int(self.of.workload["batch"])

    @property
    def micro_batches(self) -> int:
        """Of a step, as the profile fixes them; 0 where the planner chooses."""
        return int(self.of.workload.get("micro_batches", 0))

    @property
    def limits(self) -> dict[str, int]:
        """Units by type."""
        return dict(zip(TYPES, self.units, strict=False))

    @property
    def stage_of(self) -> list[int]:
        """By layer."""
        return [int(stage) for stage in np.searchsorted(self.cuts, range(self.cuts[-1] + 1))]

    @property
    def computing_s(self) -> float:
        """A sample takes in the stage that computes."""
        parts = zip(self.of.seconds, self.stage_of, strict=True)
        return sum(seconds for seconds, stage in parts if stage == self.computing)

    @property
    def workload(self) -> dict[str, Any]:
        """The content of a workload file: every stage on a type of its own."""
        layers = [
            {**layer, "cost": {TYPES[stage]: layer["cost"]["cpu"] | self._moved(stage)}}
            for layer, stage in zip(self.of.workload["layers"], self.stage_of, strict=True)
        ]
        given = {**self.of.workload, "layers": layers, "staleness": self.staleness}
        routes = self.of.workload.get("linear", ())
        given["linear"] = [{**one, "type": kind} for kind in self.limits for one in routes]
        return given | {"ps_type": "", "ps_core_s": 0.0}

    def _moved(self, stage: int) -> dict[str, float]:
        """What is priced otherwise of a stage's layers: who sleeps has no rows."""
        return {} if stage == self.computing else {"sync_s": 0.0, "delay_s": 0.0}

    @property
    def resources(self) -> dict[str, Any]:
        """The content of a resources file."""
        types = [
            {"name": name, "price_per_hour": 1.0, "limit": k, "memory_bytes": 1e12, "device": "cpu"}
            for name, k in self.limits.items()
        ]
        return {"types": types}

    def decide(self) -> Decision:
        """What the planner answers."""
        return plan(self.workload, self.resources, self.floor or None, self.method, self.seed)

    def job(self, folder: Path, steps: int, planned: Decision, core: int | None = None) -> JobSpec:
        """Write the job's code and the times of its layers; the stage that computes has `core`."""
        job = JobSpec()
        job.CopyFrom(self.of.job)
        shutil.copytree(
            job.directory, folder, ignore=lambda at, names: [n for n in names if n[-3:] != ".py"]
        )
        shutil.copy(_MODEL, folder / "paced_model.py")
        job.directory, job.output = str(folder), str(folder / "out")
        untimed = JobSpec()
        untimed.CopyFrom(job)
        no_time = dict.fromkeys(range(len(self.stage_of)), (0.0, 0.0))
        _sleep(untimed, self.of, no_time, folder / "untimed", least=0)
        size = self.batch / micro_batches_of(self, planned)
        besides = time_besides(untimed, self.cuts, math.ceil(size))
        given: dict[str, object] = {"least": math.floor(size)}
        if core is not None:
            given |= {"core": core, "computing": self._computing(), "stage": self.computing}
        _sleep(job, self.of, self.sleeping(besides, size), folder / "trace", **given)
        job.train.max_steps, job.train.epochs = steps, 1000
        job.train.staleness, job.train.drop_last = self.staleness, True
        job.train.micro_batches = self.micro_batches
        job.servers.shards, job.servers.durability = 1, "none"
        schedule = job.schedule
        schedule.Clear()
        schedule.method, schedule.min_throughput = self.method, self.floor
        schedule.given.CopyFrom(Workload.parse(self.workload).to_message())
        schedule.offered.types.extend(Resources(**self.resources).types)
        return job

    def _computing(self) -> list[str]:
        """The layers that do not sleep."""
        layers = zip(self.of.workload["layers"], self.stage_of, strict=True)
        return [layer["name"] for layer, stage in layers if stage == self.computing]

    def sleeping(
        self, besides: Sequence[tuple[float, float]], samples: float
    ) -> dict[int, tuple[float, float]]:
        """By number, of layers of the stages that sleep: forward and backward seconds a sample.

        Args:
            besides: seconds of a micro-batch that each stage takes as well.
            samples: of a micro-batch.
        """
        found = {}
        for stage, taken in enumerate(besides):
            if stage == self.computing:
                continue
            rows = [row for row, of in enumerate(self.stage_of) if of == stage]
            passes = np.array([self._passes(row, samples) for row in rows])
            # Each pass of the stage is to take what its layers do, and no layer less than nothing.
            left = 1 - np.array(taken) / samples / np.maximum(passes.sum(axis=0), 1e-12)
            for row, (forward, backward) in zip(rows, passes * np.maximum(left, 0), strict=True):
                found[row] = float(forward), float(backward)
        return found

    def _passes(self, row: int, samples: float) -> tuple[float, float]:
        """Forward and backward seconds a sample of a layer, in micro-batches of so many."""
        cost = self.of.workload["layers"][row]["cost"]["cpu"]
        share = cost.get("forward_share", 1 / 3)
        seconds = self.of.seconds[row]
        if samples < (reference := self.of.workload["reference_batch"]):
            fixed_s = cost.get("fixed_s", 0.0)
            if row == self.cuts[-1]:  # what the executor takes it takes of those that sleep, too
                fixed_s = max(0.0, fixed_s - self.of.executor_s)
            seconds += fixed_s * (1 / samples - 1 / reference)
        return seconds * share, seconds * (1 - share)


def _sleep(
    job: JobSpec,
    of: Profiled,
    times: Mapping[int, tuple[float, float]],
    trace: Path,
    **given: object,
) -> None:
    """Have layers of a job's model sleep: by number, forward and backward seconds a sample."""
    trace.mkdir()
    entry, arguments = job.model.entry, MessageToDict(job.model.args)
    names = [layer["name"] for layer in of.workload["layers"]]
    sleeping = {
        names[row]: {"forward": forward, "backward": backward, **asdict(of.forms[names[row]])}
        for row, (forward, backward) in times.items()
    }
    job.model.entry = "paced_model.py:build"
    job.model.args.Clear()
    job.model.args.update(
        {
            "entry": entry,
            "arguments": arguments,
            "sleeping": sleeping,
            "last": names[-1],
            "rows_of": of.forms[names[-1]].samples_of,
            "trace": str(trace),
            **given,
        }
    )


def profiled(name: str, step_s: float = 0.0) -> Profiled:
    """Profile a job of `JOBS` on one core.

    Args:
        step_s: that a step takes at least on that core, by a larger batch; 0: the job's own.
    """
    found = _profiled(name, 1)
    own_s = sum(found.seconds) * found.workload["batch"]
    times = math.ceil(step_s / own_s)
    return found if times <= 1 else _profiled(name, times)


def profiled_anew(of: Profiled) -> Profiled:
    """The same job, at what it takes now."""
    return _profiled(of.name, of.times)


def at_costs(cut: Cut, of: Profiled) -> Cut:
    """The same stages, at what a profile says."""
    return _with_floor(replace(cut, of=of))


def _profiled(name: str, times: int) -> Profiled:
    job = load_job(ROOT / JOBS[name])
    job.train.batch_size *= times
    prepare(job)
    job.data.path, job.data.prepare = str(data_path(job)), ""
    job.data.ClearField("valid")
    job.data.ClearField("test")
    core = {"name": "cpu", "price_per_hour": 1.0, "limit": 1, "memory_bytes": 1e12, "device": "cpu"}
    workload = profile(job, Resources(types=[core]), Settings(units=1))
    return Profiled(name, times, job, Workload.from_message(workload).to_json(), _forms(job))


def cut_at_random(number: int, of: Profiled, staleness: int) -> Cut:
    """Stages by seed, one of which is the slowest and has one unit."""
    rng = np.random.default_rng([number, staleness])
    layers, seconds = of.workload["layers"], np.array(of.seconds)
    free = [row for row, layer in enumerate(layers[:-1]) if not layer.get("uncut")]
    for _ in range(_DRAWS):
        stages = int(rng.integers(_STAGES[0], min(_STAGES[1], len(free) + 1) + 1))
        cuts = (*sorted(rng.choice(free, stages - 1, replace=False).tolist()), len(layers) - 1)
        parts = np.split(seconds, np.array(cuts[:-1]) + 1)
        taken = np.array([part.sum() for part in parts])
        computing = int(rng.integers(stages))
        units = [math.ceil(t / taken[computing]) if t else 1 for t in taken]
        if sum(units) <= UNITS:
            cut = Cut(f"{of.job.name}-{number}", of, cuts, tuple(units), computing, staleness)
            return _with_floor(cut)
    raise ValueError(f"{of.job.name}: no stages with {UNITS} units in {_DRAWS} draws")


def _with_floor(cut: Cut) -> Cut:
    """One that only the fastest plan reaches."""
    # A plan is made for a floor's share that the executor takes beside it; where none
    # reaches the floor the fastest is told.
    fastest = replace(cut, floor=_UNREACHABLE).decide().throughput
    overhead = cut.of.workload.get("overhead", 0.0)
    return replace(cut, floor=0.999999 * (1 - overhead) * fastest)


def _forms(job: JobSpec) -> dict[str, Form]:
    """What each module of the model takes and gives, by the first samples of the job."""
    model = job_model(job).train()
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    samples = min(16, batches.samples(0))
    tensors = tensors_of(batches.read(0, 0, samples))
    found: dict[str, Form] = {}

    def hook(name: str) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def note(module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(output, Tensor) and inputs:
                taken = inputs[0].shape[0] / samples
                found[name] = Form(list(output.shape[1:]), output.shape[0] / samples, taken)

        return note

    for name, module in model.named_modules():
        module.register_forward_hook(hook(name))
    with torch.no_grad():
        model(*(tensors[name] for name in signature(model.forward).parameters))
    return found
