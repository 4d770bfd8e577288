"""The numbers behind planning, in C++. Arrays must be C-contiguous."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

_Floats = NDArray[np.float64]

class Problem:
    """Layer costs as serial and parallel seconds a sample, prices and limits."""

    layers: int
    types: int
    cuts: bool

    def __init__(
        self,
        allowed: NDArray[np.bool_],
        compute_serial: _Floats,
        compute_parallel: _Floats,
        sync_serial: _Floats,
        sync_parallel: _Floats,
        transfer_serial: _Floats,
        transfer_parallel: _Floats,
        memory: _Floats,
        forward_share: _Floats,
        held: _Floats,
        most_units: _Floats,
        joined: NDArray[np.bool_],
        cuts: bool,
        price: _Floats,
        limit: _Floats,
        capacity: _Floats,
        samples: float,
        ps_core_s: float,
        ps_type: int,
        max_price: float,
        batch: float = ...,
        micro_batches: int = ...,
        staleness: int = ...,
        crossing: float = ...,
        whole_batch: bool = ...,
        lockstep: bool = ...,
        delay: _Floats | None = ...,
        handled: _Floats | None = ...,
        far: _Floats | None = ...,
        near: _Floats | None = ...,
    ) -> None: ...

def split(problem: Problem, assignment: Sequence[int]) -> list[tuple[int, int, int]]: ...
def provision(
    problem: Problem,
    assignments: NDArray[np.int32],
    floor: float,
    incumbent: float = ...,
    slack: float = ...,
    share: bool = ...,
) -> tuple[_Floats, _Floats]: ...

# What the policy sees, by name and in the order of its places: of a layer on a type, and of an
# episode's next layer on a type; engine/policy/features.h says what each is.
LAYER_FEATURES: tuple[str, ...]
STATE_FEATURES: tuple[str, ...]

class Pace:
    """A problem at one pace: a throughput to keep, samples/s."""

    floor: float
    feasible: bool
    least_price: float
    guided_price: float
    reference: float
    layers: int
    types: int

    def __init__(
        self, problem: Problem, floor: float, nodes: int = ..., shadow: float = ...
    ) -> None: ...
    def features(self) -> NDArray[np.float32]: ...

def paces(
    problem: Problem, floors: list[float], nodes: int = ..., shadow: float = ...
) -> list[Pace]: ...

class Episodes:
    """Episodes of the placement environment, stepped together."""

    def __init__(self, paces: list[Pace], layers: int, types: int) -> None: ...
    def __len__(self) -> int: ...
    def replace(self, index: int, pace: Pace) -> None: ...
    def masks(self) -> NDArray[np.uint8]: ...
    def observe(self) -> NDArray[np.float32]: ...
    def teach(self) -> _Floats: ...
    def step(self, types: NDArray[np.int64]) -> None: ...
    def done(self) -> NDArray[np.uint8]: ...
    def prices(self) -> _Floats: ...
    def assignments(self) -> NDArray[np.int32]: ...

def demonstrate(
    paces: list[Pace],
    layers: int,
    types: int,
    temperature: float,
    chance: float,
    seed: int,
    student: Network | None = ...,
) -> tuple[NDArray[np.float32], NDArray[np.uint8], _Floats, _Floats]: ...

class Found:
    """What the exact solver found."""

    assignment: list[int]  # type of each layer; empty where no plan was found
    value: float  # tau * price an hour
    bound: float  # no plan has a smaller value; infinite where there is no plan
    hard_tau: float  # ET at which that bound is lowest; 0 where the search came to its end
    fastest: list[int]  # the assignment of the highest throughput found
    fastest_tau: float
    paces: int  # at which the problem was solved

def solve(
    problem: Problem,
    floor: float,
    starts: Sequence[Sequence[int]],
    seconds: float,
    known: Sequence[tuple[float, float]] = ...,
) -> Found: ...
def cut(
    problem: Problem, assignment: Sequence[int], floor: float, seconds: float
) -> list[int]: ...
def units(problem: Problem, assignment: Sequence[int], tau: float) -> list[float]: ...
def fastest(problem: Problem, assignment: Sequence[int]) -> float: ...

class Network:
    """The policy's network, forward only."""

    def __init__(
        self,
        weights: dict[str, NDArray[np.float32]],
        distances: list[int],
        heads: int,
        blocks: int,
    ) -> None: ...
    def encode(self, pace: Pace) -> NDArray[np.float32]: ...
    def score(
        self, encoded: NDArray[np.float32], state: NDArray[np.float32], mask: NDArray[np.uint8]
    ) -> tuple[NDArray[np.float32], float]: ...
    def sample(
        self, paces: list[Pace], count: int, temperature: float, seed: int
    ) -> NDArray[np.int32]: ...
    def revise(
        self,
        paces: list[Pace],
        assignments: NDArray[np.int32],
        trials: int,
        window: int,
        temperature: float,
        heat: float,
        slack: float,
        seed: int,
        floor: float = ...,
    ) -> NDArray[np.int32]: ...
    def replay(
        self, pace: Pace, assignment: NDArray[np.int32]
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...

def simulate(
    stages: Sequence[tuple[int, float, float, float, float]],
    micro_batches: int,
    staleness: int,
    steps: int,
    way: float = ...,
    whole_batch: bool = ...,
    delays: Sequence[float] = ...,
) -> list[float]: ...
def step_bound(
    stages: Sequence[tuple[int, float, float, float, float]],
    micro_batches: int,
    way: float = ...,
    delays: Sequence[float] = ...,
) -> float: ...
def step_seconds(
    stages: Sequence[tuple[int, float, float, float, float]],
    micro_batches: int,
    staleness: int,
    slowest: float,
    way: float = ...,
    whole_batch: bool = ...,
    delays: Sequence[float] = ...,
) -> float: ...

class StepFound:
    """A plan by simulated steps."""

    assignment: list[int]  # with the cuts of its stages; empty where no plan was found
    units: list[int]  # of its stages
    value: float  # seconds a sample * price an hour
    tau: float  # seconds a sample
    bound: float  # no plan has a smaller value; infinite where there is no plan

def solve_steps(
    problem: Problem,
    floor: float,
    starts: Sequence[Sequence[int]],
    labels: int,
    all: bool,
    seconds: float,
    fixed: bool = ...,
    incumbent: float = ...,
    fastest: bool = ...,
) -> StepFound: ...

class RunStage:
    """A stage of a simulated run: seconds a micro-batch of a worker, `sync` a step.

    `slowness` has a factor of each worker's times, or nothing. What is passed on takes `host_link`
    each way on the link of the worker's host, which `per_host` workers share.
    """

    def __init__(
        self,
        units: int,
        forward: float,
        backward: float,
        cross: float = ...,
        sync: float = ...,
        way: float = ...,
        slowness: Sequence[float] = ...,
        host_link: float = ...,
        per_host: int = ...,
        delay: float = ...,
    ) -> None: ...

class Serving:
    """Shards of a simulated run; all but seconds of messages are of a micro-batch at one shard."""

    shards: int
    priced: bool
    way: float
    client_message: float
    client_pull: float
    client_push: float
    message: float
    pull: float
    push: float
    commit: float
    pull_link: float
    push_link: float
    shard_pull_link: float
    shard_push_link: float
    slowness: Sequence[float]

    def __init__(self) -> None: ...

class Kills:
    """Units that are taken away, and what each has all wait for."""

    def __init__(self, per_s: float, lost_s: float, back: bool = ...) -> None: ...

class RunRules:
    """What holds for all stages of a simulated run."""

    end: float
    part: float
    closing: float
    tell: float
    tell_rows: float
    cores: int
    noise: float
    seed: int
    kills: Sequence[Kills]
    cut_every: int

    def __init__(
        self, micro_batches: int, staleness: int, steps: int, whole_batch: bool = ...
    ) -> None: ...

class RunResult:
    """What a simulated run came to."""

    updated: list[float]  # when each update was made
    spent: list[list[float]]  # worker seconds by stage: computing, executing, and waiting for
    # rows, sums, what crosses and others; then what kills cost
    kills: int
    redone: int  # updates made once more
    backwards: int  # that counted, of all stages
    serving: float  # shard seconds

def simulate_run(stages: Sequence[RunStage], serving: Serving, rules: RunRules) -> RunResult: ...
