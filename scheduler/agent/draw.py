"""The PPO agent: plans any problem with one policy that was trained beforehand.

A plan is drawn layer by layer from the policy at a *pace*, a throughput to keep. The agent tries
paces from the floor up, draws more where its plans came out cheapest, and provisions every
assignment exactly. What it returns comes from the policy's own samples alone.
"""

import math
import time
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from scheduler.agent import paces
from scheduler.agent.policy import Policy, shipped
from scheduler.agent.samples import Samples, Search
from scheduler.decision.record import TrainingPoint
from scheduler.engine import _planner
from scheduler.problem.cost import TOLERANCE, CostModel, Floats
from scheduler.problem.plan import Plan
from scheduler.problem.provision import provision as provisioned

# Where no more assignments than this exist, each is likely to be drawn at an even temperature.
_FEW, _EVEN = 64, 50.0
_QUICK_LAYERS, _THOROUGH = 32, 400_000
_SHADOWS = (0.0, 0.5, 1.0)  # how far prices are moved to those with shared limits priced in
_TIGHT = 1  # passes that may be idle besides where shared limits bind
_NEAR = 3e-3  # a plan so near to the bound is not worth another attempt
_APART = 3  # layers in which plans revised at one pace differ
# To reach a floor that flushed steps miss: times the trials of a pass, and how often.
_STEPPED_TRIALS, _FLUSHED_RESCUES = 3, 8
_FAR = 256  # plans drawn anew between, up to `_QUICK_LAYERS`


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
    """How much is drawn: rounds that narrow down, then passes that revise the best plans.

    A pass draws parts of up to `starts` plans anew, `trials` times each, at most so many layers at
    once as `windows` says for it; passes end when `patience` of them in a row saved less than a
    thousandth. All of it is done up to `attempts` times where a cheaper plan is known to exist.
    `nodes` is the effort of the masks' search where limits are tight.
    """

    rounds: tuple[Round, ...] = (Round(20, 2, 1.3), Round(6, 4, 1.1))
    passes: int = 8
    patience: int = 2
    starts: int = 6
    trials: int = 300
    windows: tuple[int, ...] = (4, 8, 16)
    temperature: float = 2.0
    heat: float = 0.003
    slack: tuple[float, ...] = (2.0, 1.0, 1.5)
    nodes: int = 20_000
    attempts: int = 4

    @classmethod
    def of(cls, model: CostModel) -> "Effort":
        """What fits a problem: tens of milliseconds up to 32 layers, then what quality asks."""
        pairs = model.num_layers * model.num_types
        if model.num_layers <= _QUICK_LAYERS:
            return cls()
        if pairs <= 640:
            more = (Round(36, 5, 1.3), Round(18, 12, 1.0))
            return cls(more, 16, patience=4, starts=16, trials=1000, nodes=_THOROUGH)
        # Drawing takes time with layers times types, and attention with the square of the layers.
        if pairs <= 3000:
            rounds = (Round(20, 4, 1.3), Round(8, 6, 1.0))
            return cls(rounds, passes=4, starts=8, trials=120, attempts=1)
        return cls((Round(2, 2, 1.0),), passes=0, attempts=1)


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


def draw(
    model: CostModel,
    floor: float = 0.0,
    seed: int = 0,
    effort: Effort | None = None,
    policy: Policy | None = None,
    finetune: float = 0.0,
    bound: float = 0.0,
    attained: bool = False,
) -> Drawn:
    """Plan with the policy.

    Args:
        floor: samples/s to reach; 0 for the cheapest at any speed.
        bound: no plan is cheaper, in dollars; drawing ends with one that costs no more, as none of
            those still to come could take its place.
        attained: some plan costs no more than the bound. Drawing starts anew, a few times, as long
            as its plans cost clearly more.
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
    search = Search(low, max(top, low), effort.rounds[0].paces)
    goal = bound * 3600 / model.samples * (1 + TOLERANCE)
    samples = Samples(model, floor, goal)
    for attempt in range(effort.attempts if attained else 1):
        own = Samples(model, floor, goal)
        _attempt(
            own, policy.network, effort, search, fastest, (attempt, seed + 15_485_863 * attempt)
        )
        samples.join(own)
        if not samples.ranked() or samples.best <= goal * (1 + _NEAR):
            break
    if not samples.ranked():
        return _missed(model, floor, seed, policy, samples)
    if finetune <= 0 or samples.done:
        return best_of(model, floor, policy, samples)
    tuned, curve = _finetune(samples, policy, effort, search, seed, finetune)
    return replace(best_of(model, floor, tuned, samples), curve=curve)


def _attempt(
    samples: Samples,
    network: _planner.Network,
    effort: Effort,
    search: Search,
    fastest: _planner.Pace | None,
    how: tuple[int, int],
) -> None:
    """Draw rounds, then revise; `how` is the number of the attempt and its seed."""
    attempt, seed = how
    model = samples.model
    if fastest is None and not _rescued(samples, network, effort, search, seed):
        return
    tight = fastest is None
    for number, step in enumerate(effort.rounds):
        if samples.done:
            return
        wanted = search.around(samples, step.paces) if number else search.grid(attempt)
        kept = _planner.paces(model.native, wanted, effort.nodes)
        if kept:
            words = seed * 7919 + number
            draws = max(step.draws, step.draws * step.paces // len(kept))
            samples.add(network.sample(kept, draws, step.temperature, words))
            if number == 0 and np.log(model.usable.sum(axis=1)).sum() <= math.log(_FEW) + 1e-9:
                samples.add(network.sample(kept, _FEW, _EVEN, words))
            binding = [pace.floor for pace in kept if _binds(pace)]
            tight = tight or bool(binding)
            if binding:
                shadow = _SHADOWS[1 + number % 2]
                priced = _planner.paces(model.native, binding, effort.nodes, shadow)
                samples.add(network.sample(priced, draws, step.temperature, words))
    if fastest is not None and not samples.ranked():
        # Its masks were searched for longer than those of the rounds.
        samples.add(network.sample([fastest], effort.starts, 1.3, seed))
        if not samples.ranked() and not _rescued(samples, network, effort, search, seed):
            return
        tight = True
    idle, more = 0, _TIGHT if tight else 0
    for number in range(effort.passes + 2 * more):
        if samples.done:
            return
        before = samples.best
        _revise(samples, network, effort, search, (number, seed * 7919 + 17 + number), tight)
        idle = idle + 1 if samples.best > before * (1 - 1e-3) else 0
        if idle == effort.patience + more:
            return


def _binds(pace: _planner.Pace) -> bool:
    """Whether limits that stages share keep the pace from its cheapest way."""
    return pace.guided_price > pace.least_price * (1 + 1e-9)


def _revise(
    samples: Samples,
    network: _planner.Network,
    effort: Effort,
    search: Search,
    how: tuple[int, int],
    tight: bool,
) -> None:
    """Draw parts of the cheapest plans anew.

    `how` is the number of the pass and its seed; `tight` says whether shared limits bind. Plans are
    revised at the pace that they run at, and in turn at a slower and at a neighbouring one.
    """
    number, seed = how
    chance = np.random.default_rng(seed)
    shadows = _SHADOWS if tight else _SHADOWS[:1]
    made: list[_planner.Pace] = []
    starts: list[NDArray[np.int32]] = []
    for index in samples.ranked():
        row = samples.assignments[index]
        rate = search.clipped(1 / samples.taus[index])
        # Where the floor binds the best plans all run at it, and many are all but the same.
        same_pace = (starts[n] for n, o in enumerate(made) if abs(math.log(rate / o.floor)) <= 1e-3)
        if any(int((row != other).sum()) < _APART for other in same_pace):
            continue
        turn, shadow = divmod(len(made), 3)[::-1]
        moved = search.slowed if samples.model.steps.flushed else search.moved
        rate = moved(rate, (turn + number) % 3, chance)
        priced = shadows[(shadow + number) % len(shadows)]
        made.append(search.pace(samples.model, rate * (1 - 1e-9), priced))
        starts.append(row)
        if len(made) == effort.starts:
            break
    if samples.model.steps.flushed and made:
        # Plans that are far from the cheapest lead elsewhere.
        pace = search.pace(samples.model, search.low * (1 - 1e-9), 0.0)
        other = network.sample([pace], 1 + effort.starts // 2, _EVEN, seed)
        starts += list(other)
        made += [pace] * len(other)
    if made:
        drawn = network.revise(
            made,
            np.stack(starts),
            effort.trials,
            effort.windows[number % len(effort.windows)],
            effort.temperature,
            effort.heat * (number % 2),
            effort.slack[(number + number // 3) % len(effort.slack)] if tight else 1.0,
            seed,
            samples.floor,
        )
        samples.add(drawn)


def _rescued(
    samples: Samples, network: _planner.Network, effort: Effort, search: Search, seed: int
) -> bool:
    """Whether revising the fastest plans finds one that keeps the floor where no mask did."""
    model = samples.model
    fastest = paces.fastest(model.native, paces.slowest(model))[1]
    if fastest is None:
        return False
    apart = [paces.slowest(model), search.low, math.sqrt(search.low * search.top)]
    far = [fastest, *_planner.paces(model.native, apart, effort.nodes)]
    starts = network.sample([fastest], effort.starts, 1.3, seed)
    most = _FAR if model.num_layers <= _QUICK_LAYERS else effort.starts
    made = [search.pace(model, search.low * (1 - 1e-9), s) for s in _SHADOWS]
    trials = (_STEPPED_TRIALS if model.steps.flushed else 20) * effort.trials
    for number in range(_FLUSHED_RESCUES if model.steps.flushed else 4):
        begun = starts
        if model.steps.flushed and number % 2:  # plans that are far from the fastest lead elsewhere
            heat = _EVEN if number % 4 == 1 else effort.temperature
            others = network.sample(far, max(1, most // len(far)), heat, seed + number)
            samples.add(others)
            if samples.ranked():
                return True
            begun = others[:: max(1, len(others) // effort.starts)]
        if not len(begun):
            continue
        drawn = network.revise(
            [made[n % len(made)] for n in range(len(begun))],
            begun,
            trials,
            effort.windows[number % len(effort.windows)],
            effort.temperature,
            0.0,
            effort.slack[0],
            seed + number,
            samples.floor,
        )
        samples.add(drawn)
        if samples.ranked():
            return True
    return False


def _finetune(
    samples: Samples, policy: Policy, effort: Effort, search: Search, seed: int, seconds: float
) -> tuple[Policy, tuple[TrainingPoint, ...]]:
    """Draw on for a while, learn, and draw from what was learned."""
    # Takes seconds to import, which do not count.
    from scheduler.agent.training.finetune import tune

    model = samples.model
    started = time.monotonic()

    def draw_until(network: _planner.Network, end: float, words: int) -> None:
        # Wide and narrow, warm and cool in turn.
        number = 0
        while time.monotonic() < end:
            search.narrow()
            kept = _planner.paces(model.native, search.around(samples, 12), _THOROUGH)
            if kept:
                samples.add(network.sample(kept, 12, (1.3, 0.8, 1.8)[number % 3], words + number))
            if time.monotonic() < end:
                tight = any(_binds(pace) for pace in kept)
                _revise(samples, network, effort, search, (number, words + number), tight)
            number += 1

    draw_until(policy.network, started + 0.4 * seconds, (seed + 1) * 1_000_003)

    def drawn(assignments: NDArray[np.int32]) -> float:
        samples.add(assignments)
        return samples.best * model.samples / 3600

    learned = tune(
        policy,
        lambda: search.around(samples, 6),
        lambda rate: _planner.Pace(model.native, rate),
        drawn,
        started + 0.75 * seconds,
        seed,
    )
    draw_until(learned.network, started + seconds, (seed + 2) * 1_000_003)
    return replace(policy, network=learned.network), learned.curve


def best_of(model: CostModel, floor: float, policy: Policy, samples: Samples) -> Drawn:
    """Provision the cheapest samples in full, and replay the best."""
    ranked = samples.ranked()[:3]
    plans = [provisioned(model, samples.assignments[n].tolist(), floor) for n in ranked]
    if not plans:
        # Those drawn for speed come last; the fastest of one takes longer to find where each is
        # simulated.
        most = 4 if model.steps.simulated else 64
        ranked = list(reversed(range(len(samples.assignments))))[:most]
        plans = [provisioned(model, samples.assignments[n].tolist(), floor) for n in ranked]
    place = min(range(len(plans)), key=lambda n: _order(model, plans[n]))
    plan = plans[place]
    chances, values = _replayed(model, policy, samples.assignments[ranked[place]], plan)
    return Drawn(
        plan,
        tuple(tuple(float(chance) for chance in row) for row in chances),
        tuple(float(value) for value in values),
        len(samples.seen),
    )


def _order(model: CostModel, plan: Plan) -> tuple[bool, float, float]:
    """A plan's rank; of equally cheap ones that stages are cut in, fewer come first."""
    if not (model.cuts and plan.feasible):
        return plan.rank
    return False, float(f"{plan.cost:.9g}"), len(plan.stages)


def _replayed(
    model: CostModel, policy: Policy, assignment: NDArray[np.int32], plan: Plan
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    if plan.throughput <= 0:
        return np.zeros(model.allowed.shape, np.float32), np.zeros(model.num_layers, np.float32)
    pace = _planner.Pace(model.native, plan.throughput / model.expected.slowdown * (1 - 1e-9))
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
