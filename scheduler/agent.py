"""The PPO agent: plans any problem with one policy that was trained beforehand.

A plan is drawn layer by layer from the policy at a *pace*, a throughput to keep. The agent tries
paces from the floor up, draws more where its plans came out cheapest, and provisions every
assignment exactly. What it returns comes from the policy's own samples alone.
"""

import math
import time
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from scheduler import paces
from scheduler._planner import Network, Pace, provision
from scheduler._planner import paces as keep
from scheduler.cost import CostModel, Floats, Plan
from scheduler.decision import TrainingPoint
from scheduler.policy import Policy, shipped
from scheduler.provision import provision as provisioned

# Where no more assignments than this exist, each is likely to be drawn at an even temperature.
_FEW, _EVEN = 64, 50.0
_QUICK_LAYERS, _THOROUGH = 32, 400_000
_STARTS = 3  # of rollouts at one pace


@dataclass(frozen=True, slots=True)
class Round:
    """At most so many paces, and so many plans drawn at each, the first the likeliest one.

    Where fewer paces are worth trying, as many plans are drawn in all.
    """

    paces: int
    draws: int
    temperature: float


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is drawn: rounds that narrow down, then passes of rollouts around the best plans.

    A rollout draws some layers anew `draws` times, all along a plan, `sweeps` times. A pass does so
    for `rollouts` plans, with a window of `windows[n]` layers in pass n; after the second pass the
    next follows only while one still saves a thousandth. `nodes` is the effort of the masks' search
    where limits are tight.
    """

    rounds: tuple[Round, ...] = (Round(26, 6, 1.3), Round(12, 10, 1.1))
    windows: tuple[int, ...] = (6, 14, 4, 20, 9, 30)
    rollouts: int = 10
    draws: int = 6
    temperature: float = 1.8
    sweeps: int = 2
    nodes: int = 100_000

    @classmethod
    def of(cls, model: CostModel) -> "Effort":
        """What fits a problem: tens of milliseconds up to 32 layers, then what quality asks."""
        pairs = model.num_layers * model.num_types
        if model.num_layers <= _QUICK_LAYERS:
            return cls()
        if pairs <= 640:
            more = (Round(36, 5, 1.3), Round(18, 12, 1.0))
            windows = (6, 20, 4, 12, 30, 6)
            return cls(more, windows, rollouts=24, draws=12, temperature=1.8, nodes=_THOROUGH)
        # Drawing takes time with layers times types, and attention with the square of the layers.
        if pairs <= 3000:
            return cls((Round(20, 4, 1.3), Round(8, 6, 1.0)), (8, 20), rollouts=6, draws=4)
        return cls((Round(2, 2, 1.0),), ())


@dataclass(frozen=True, slots=True)
class Drawn:
    """The best plan of the policy's samples and what the policy thought of it.

    `probabilities` [layers][types] and `values` [layers] are the policy's along the plan;
    `evaluations` counts the assignments that were provisioned.
    """

    plan: Plan
    probabilities: tuple[tuple[float, ...], ...]
    values: tuple[float, ...]
    evaluations: int
    curve: tuple[TrainingPoint, ...] = ()


@dataclass(slots=True)
class Samples:
    """Assignments drawn so far, each once, with value (tau * price an hour), tau and pace."""

    model: CostModel
    floor: float
    best: float = math.inf
    seen: set[bytes] = field(default_factory=set)
    values: list[float] = field(default_factory=list)
    taus: list[float] = field(default_factory=list)
    assignments: list[NDArray[np.int32]] = field(default_factory=list)

    def add(self, drawn: NDArray[np.int32]) -> None:
        """Provision those not seen before."""
        fresh: list[NDArray[np.int32]] = []
        for row in drawn:
            key = row.tobytes()
            if key not in self.seen:
                self.seen.add(key)
                fresh.append(row)
        if not fresh:
            return
        # Plans within a tenth of the best are worth going on from; the units of others do not
        # matter, nor do those that could save less than 1e-4.
        worth = 1.1 * self.best
        values, taus = provision(self.model.native, np.stack(fresh), self.floor, worth, 1e-4)
        self.assignments += fresh
        self.values += values.tolist()
        self.taus += taus.tolist()
        self.best = min(self.best, float(values.min()))

    def ranked(self) -> list[int]:
        """Indices of the plans that meet the demands, cheapest first."""
        order = np.argsort(self.values, kind="stable")
        return [int(n) for n in order if math.isfinite(self.values[n])]


def draw(
    model: CostModel,
    floor: float = 0.0,
    seed: int = 0,
    effort: Effort | None = None,
    policy: Policy | None = None,
    finetune: float = 0.0,
) -> Drawn:
    """Plan with the policy.

    Args:
        floor: samples/s to reach; 0 for the cheapest at any speed.
        policy: the shipped one unless given.
        finetune: seconds to go on learning on this very problem (needs torch).

    Raises:
        ValueError: a layer has no type that can run it.
    """
    if not model.usable.any(axis=1).all():
        raise ValueError("a layer has no type that can run it")
    effort = effort or Effort.of(model)
    policy = policy or shipped()
    low = max(floor, paces.slowest(model) if floor <= 0 else 0.0)
    top, fastest = paces.fastest(model.native, low)
    samples = Samples(model, floor)
    if fastest is None:
        return _missed(model, floor, seed, policy, samples)
    search = _Range(low, top, effort.rounds[0].paces)
    for number, step in enumerate(effort.rounds):
        wanted = search.around(samples, step.paces) if number else search.grid
        kept = keep(model.native, wanted, effort.nodes)
        if kept:
            words = seed * 7919 + number
            draws = max(step.draws, step.draws * step.paces // len(kept))
            samples.add(policy.network.sample(kept, draws, step.temperature, words))
            if number == 0 and np.log(model.usable.sum(axis=1)).sum() <= math.log(_FEW) + 1e-9:
                samples.add(policy.network.sample(kept, _FEW, _EVEN, words))
    for number, window in enumerate(effort.windows):
        before = samples.best
        words = seed * 7919 + 17 + number
        # Every third pass warmer: what the policy all but excludes is sometimes what is missing.
        warmth = effort.temperature * (1.7 if number % 3 == 2 else 1.0)
        _roll_out(samples, policy.network, effort, (window, warmth), search, words)
        if number and samples.best > before * (1 - 1e-3):
            break
    if finetune <= 0 or not samples.ranked():
        return best_of(model, floor, policy, samples)
    tuned, curve = _finetune(samples, policy, effort, search, seed, finetune)
    return replace(best_of(model, floor, tuned, samples), curve=curve)


def _roll_out(
    samples: Samples,
    network: Network,
    effort: Effort,
    how: tuple[int, float],
    search: "_Range",
    seed: int,
) -> None:
    """Draw again around the cheapest plans, each at the pace that it runs at.

    `how` is the window of layers and the temperature.
    """
    window, temperature = how
    made: list[Pace] = []
    starts = []
    for index in samples.ranked():
        rate = search.clipped(1 / samples.taus[index])
        # Where the floor binds the best plans all run at it; elsewhere paces should differ.
        alike = sum(abs(math.log(rate / other.floor)) <= 1e-3 for other in made)
        if alike < _STARTS:
            made.append(search.pace(samples.model, rate * (1 - 1e-9), alike, effort.nodes))
            starts.append(samples.assignments[index])
        if len(made) >= effort.rollouts:
            break
    kept = [n for n, pace in enumerate(made) if pace.feasible]
    if kept:
        drawn = network.rollout(
            [made[n] for n in kept],
            np.stack([starts[n] for n in kept]),
            window,
            effort.draws,
            temperature,
            effort.sweeps,
            seed,
        )
        samples.add(drawn)


def _finetune(
    samples: Samples, policy: Policy, effort: Effort, search: "_Range", seed: int, seconds: float
) -> tuple[Policy, tuple[TrainingPoint, ...]]:
    """Draw on for a while, learn, and draw from what was learned."""
    from scheduler.training.finetune import tune  # takes seconds to import, which do not count

    model = samples.model
    started = time.monotonic()

    def draw_until(network: Network, end: float, words: int) -> None:
        # Wide and narrow, warm and cool in turn.
        number = 0
        while time.monotonic() < end:
            search.narrow()
            kept = keep(model.native, search.around(samples, 12), _THOROUGH)
            if kept:
                samples.add(network.sample(kept, 12, (1.3, 0.8, 1.8)[number % 3], words + number))
            window = (6, 14, 4, 20, 9)[number % 5]
            if time.monotonic() < end:
                _roll_out(
                    samples, network, effort, (window, effort.temperature), search, words + number
                )
            number += 1

    draw_until(policy.network, started + 0.4 * seconds, (seed + 1) * 1_000_003)

    def drawn(assignments: NDArray[np.int32]) -> float:
        samples.add(assignments)
        return samples.best * model.samples / 3600

    learned = tune(
        policy,
        lambda: search.around(samples, 6),
        lambda rate: Pace(model.native, rate),
        drawn,
        started + 0.75 * seconds,
        seed,
    )
    draw_until(learned.network, started + seconds, (seed + 2) * 1_000_003)
    return replace(policy, network=learned.network), learned.curve


class _Range:
    """The paces between the floor and the highest that can be kept, ever closer to the best."""

    def __init__(self, low: float, top: float, most: int) -> None:
        self.low, self.top = low, top
        ratio = max(top / low, 1.0)
        count = int(np.clip(round(6 + 6 * math.log2(ratio)), min(6, most), most))
        self.grid: list[float] = np.geomspace(low, top, count).tolist()
        self._beside = max(ratio ** (0.5 / max(count - 1, 1)), 1.01)
        self._made: dict[tuple[float, int], Pace] = {}

    def clipped(self, rate: float) -> float:
        """The pace nearest to `rate` within the range."""
        return min(max(rate, self.low), self.top)

    def pace(self, model: CostModel, rate: float, slot: int, nodes: int) -> Pace:
        """A pace that is kept, with what its masks have found out; each slot has its own."""
        key = rate, slot
        if key not in self._made:
            self._made[key] = Pace(model.native, rate, nodes)
        return self._made[key]

    def narrow(self) -> None:
        """Look closer to the best paces from now on; start wide again once very close."""
        self._beside = self._beside**0.7 if self._beside > 1.003 else 1.1

    def around(self, samples: Samples, count: int) -> list[float]:
        """Paces at which the cheapest plans so far run, and beside them."""
        rates: list[float] = []
        for index in samples.ranked():
            rate = self.clipped(1 / samples.taus[index])
            if all(abs(math.log(rate / other)) > 1e-3 for other in rates):
                rates.append(rate)
            if 3 * len(rates) >= count:
                break
        # A plan drawn for a pace beside rounds its units otherwise, and often runs at this one.
        beside = [rate * by for rate in rates for by in (self._beside, 1 / self._beside)]
        rates += [rate for rate in beside if self.low <= rate <= self.top]
        return rates[:count]


def best_of(model: CostModel, floor: float, policy: Policy, samples: Samples) -> Drawn:
    """Provision the cheapest samples in full, and replay the best."""
    ranked = samples.ranked()[:3]
    plans = [provisioned(model, samples.assignments[n].tolist(), floor) for n in ranked]
    if not plans:
        plans = [provisioned(model, row.tolist(), floor) for row in samples.assignments[:64]]
        ranked = list(range(len(plans)))
    place = min(range(len(plans)), key=lambda n: plans[n].rank)
    plan = plans[place]
    chances, values = _replayed(model, policy, samples.assignments[ranked[place]], plan)
    return Drawn(
        plan,
        tuple(tuple(float(chance) for chance in row) for row in chances),
        tuple(float(value) for value in values),
        len(samples.seen),
    )


def _replayed(
    model: CostModel, policy: Policy, assignment: NDArray[np.int32], plan: Plan
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if plan.throughput <= 0:
        return np.zeros(model.allowed.shape, np.float32), np.zeros(model.num_layers, np.float32)
    pace = Pace(model.native, plan.throughput * (1 - 1e-9))
    return policy.network.replay(pace, assignment)


def _missed(model: CostModel, floor: float, seed: int, policy: Policy, samples: Samples) -> Drawn:
    """What comes nearest where the floor cannot be kept: a plan at the highest pace that can."""
    fastest = paces.fastest(model.native, paces.slowest(model))[1]
    if fastest is not None:
        samples.add(policy.network.sample([fastest], 16, 1.0, seed))
    if not samples.assignments:
        usable: Floats = np.where(model.usable, 0.0, np.inf)
        samples.add(usable.argmin(axis=1).astype(np.int32)[None])
    return best_of(model, floor, policy, samples)
