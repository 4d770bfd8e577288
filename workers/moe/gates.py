"""The gates of a mixture of experts by name."""

from collections.abc import Callable
from typing import Any

from workers.moe.gate import Decision, Gate
from workers.moe.gates_balanced import Bias, ExpertChoice, NoisyTopK
from workers.moe.gates_topk import GShard, Prototype, Switch, TopK

__all__ = [
    "GATES",
    "Bias",
    "Decision",
    "ExpertChoice",
    "GShard",
    "Gate",
    "NoisyTopK",
    "Prototype",
    "Switch",
    "TopK",
    "make_gate",
]

GATES: dict[str, Callable[..., Gate]] = {
    "topk": TopK,
    "switch": Switch,
    "gshard": GShard,
    "noisy": NoisyTopK,
    "prototype": Prototype,
    "expert_choice": ExpertChoice,
    "bias": Bias,
}


def make_gate(
    gate: str | Gate,
    dim: int,
    experts: int,
    k: int | None,
    seed: int | None,
    options: dict[str, Any],
) -> Gate:
    """The gate of that name, made with `options`, or the given one if it fits.

    Raises:
        ValueError: no such name, an option out of range, or a gate that does not fit.
        TypeError: an option that the gate does not have.
    """
    if not isinstance(gate, Gate):
        if gate not in GATES:
            raise ValueError(f"MoE: gate: expected a Gate or one of {', '.join(GATES)}, got {gate}")
        return GATES[gate](dim, experts, k, seed=seed, **options)
    if options:
        raise TypeError(f"MoE: {next(iter(options))}: expected no options beside a Gate")
    if (gate.dim, gate.num_experts) != (dim, experts) or k not in (None, gate.k):
        raise ValueError(
            f"MoE: gate: expected one of dim={dim}, experts={experts}"
            f"{'' if k is None else f', k={k}'}, got {gate.extra_repr()}"
        )
    return gate
