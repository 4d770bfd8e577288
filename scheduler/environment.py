"""The placement problem as a Gymnasium environment: one step places one layer."""

from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from scheduler.baselines import Evaluator
from scheduler.cost import CostModel, Plan

KINDS = ("embedding", "dense", "moe")
_LOG_RANGE = 8.0  # natural logarithms beyond this are clipped


class PlacementEnv(gymnasium.Env[NDArray[np.float32], np.int64]):
    """Places the layers of one workload in order; the reward comes with the last.

    Action: index of the resource type of the current layer. Observation: features in [-1, 1]
    without scale, so instances look alike whatever their units (see `_static_features`).
    Reward: -log(cost / reference cost); a plan that misses the floor gets less than any that
    reaches it, by its shortfall. An action that `action_masks` excludes ends the episode with the
    least reward.

    Args:
        evaluate: prices complete assignments; may be shared by several environments.
        reference: a cost in dollars that reward 0 stands for.
    """

    metadata: dict[str, Any] = {"render_modes": []}  # noqa: RUF012

    def __init__(self, evaluate: Evaluator, reference: float) -> None:
        self.model = evaluate.model
        self.evaluate = evaluate
        self.reference = reference
        self._static, self._share = _static_features(self.model, evaluate.floor)
        size = self._static.shape[1] + 3 * self.model.num_types + 1
        self.observation_space = spaces.Box(-1.0, 1.0, (size,), np.float32)
        self.action_space = spaces.Discrete(self.model.num_types)
        self.assignment: list[int] = []
        self.plan: Plan | None = None
        self._usable = self.model.usable

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[NDArray[np.float32], dict[str, Any]]:
        """Start with no layer placed."""
        super().reset(seed=seed)
        self.assignment = []
        self.plan = None
        self._load = np.zeros(self.model.num_types)
        self._run_memory = 0.0
        return self._observe(), {}

    def step(
        self, action: np.int64
    ) -> tuple[NDArray[np.float32], float, bool, bool, dict[str, Any]]:
        """Place the current layer on type `action`."""
        kind, row = int(action), len(self.assignment)
        if not self.action_masks()[kind]:
            return self._observe(), -5.0, True, False, {"unusable": True}
        same = bool(self.assignment) and self.assignment[-1] == kind
        memory = float(self.model.memory[row, kind])
        self._run_memory = memory + (self._run_memory if same else 0.0)
        self._load[kind] += self._share[row]
        self.assignment.append(kind)
        if row + 1 < self.model.num_layers:
            return self._observe(), 0.0, False, False, {}
        self.plan = self.evaluate(self.assignment)
        info = {"plan": self.plan, "assignment": tuple(self.assignment)}
        return (
            self._observe(),
            reward(self.plan, self.reference, self.evaluate.floor),
            True,
            False,
            info,
        )

    def action_masks(self) -> NDArray[np.bool_]:
        """Return which types the current layer may go to, [T]; at least one.

        A type that may not run the layer never is; one whose memory the current stage would
        exceed is not while there is another.
        """
        row = min(len(self.assignment), self.model.num_layers - 1)
        usable: NDArray[np.bool_] = self._usable[row].copy()
        if self.assignment and row == len(self.assignment):
            last = self.assignment[-1]
            full = self._run_memory + self.model.memory[row, last] > self.model.capacity[last]
            if full and usable.sum() > 1:
                usable[last] = False
        return usable

    def _observe(self) -> NDArray[np.float32]:
        row = min(len(self.assignment), self.model.num_layers - 1)
        previous = np.zeros(self.model.num_types)
        if self.assignment:
            previous[self.assignment[-1]] = 1.0
        moving = [len(self.assignment) / self.model.num_layers]
        parts = (self._static[row], previous, self._load, self.action_masks(), moving)
        return np.clip(np.concatenate(parts), -1.0, 1.0).astype(np.float32)


def reward(plan: Plan, reference: float, floor: float) -> float:
    """Return the reward of a complete plan, from -5 to 2."""
    if plan.feasible:
        if plan.cost <= 0 or reference <= 0:
            return 2.0 if plan.cost <= reference else -2.0
        return float(np.clip(-np.log(plan.cost / reference), -2.0, 2.0))
    return -3.0 - (1.0 - min(plan.throughput / floor, 1.0) if floor > 0 else 1.0)


def _static_features(
    model: CostModel, floor: float
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Features of each layer that do not depend on earlier choices.

    Per type: log money of the layer relative to its cheapest type; log communication against
    computation; log transfer to the next layer against computation; log of the units the layer
    alone needs at the floor, relative to the limit; log price relative to the cheapest. Then the
    layer's kind, and its share of the money.

    Returns:
        features [L, n] and each layer's share of the work [L], summing to 1.
    """
    compute = model.compute_serial + model.compute_parallel
    sync = model.sync_serial + model.sync_parallel
    transfer = model.transfer_serial + model.transfer_parallel
    busy = np.maximum(compute, sync)
    tiny = max(float(busy.max()), 1e-300) * 1e-6
    money = (busy + tiny) * np.maximum(model.price, model.price.max() * 1e-6 + 1e-300)
    usable = model.usable
    cheapest = np.where(usable, money, np.inf).min(axis=1, keepdims=True)
    price = np.broadcast_to(
        np.log(np.maximum(model.price, 1e-9) / max(model.price.min(), 1e-9)), usable.shape
    )
    tightness = np.log(np.maximum(busy * floor / model.limit, 1e-6)) if floor > 0 else busy * 0 - 9
    logs = [
        np.log(money / cheapest),
        np.log((sync + tiny) / (compute + tiny)),
        np.log((transfer + tiny) / (compute + tiny)),
        tightness,
        price,
    ]
    by_type = np.concatenate(
        [
            np.where(usable, np.clip(log / _LOG_RANGE, -1, 1), 1.0 - 2.0 * (n > 0))
            for n, log in enumerate(logs)
        ],
        axis=1,
    )
    kinds = np.array(
        [[float(layer.kind == kind) for kind in KINDS] for layer in model.workload.layers]
    )
    share = cheapest[:, 0] / cheapest.sum()
    return np.concatenate([by_type, kinds, np.sqrt(share)[:, None]], axis=1), share
