"""The gates of a mixture of experts by name."""

from collections.abc import Callable

from workers.moe.config import MoEConfig
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


def make_gate(config: MoEConfig) -> Gate:
    """The gate of a layer, made or given.

    Raises:
        ValueError: no such name, an option out of range, or a gate that does not fit.
        TypeError: an option that the gate does not have.
    """
    gate, dim, experts, k = config.gate, config.dim, config.experts, config.k
    if not isinstance(gate, Gate):
        if gate not in GATES:
            raise ValueError(f"MoE: gate: expected a Gate or one of {', '.join(GATES)}, got {gate}")
        return GATES[gate](dim, experts, k, seed=config.seed, **config.gate_options)
    if config.gate_options:
        option = next(iter(config.gate_options))
        raise TypeError(f"MoE: {option}: expected no options beside a Gate")
    if (gate.dim, gate.num_experts) != (dim, experts) or k not in (None, gate.k):
        raise ValueError(
            f"MoE: gate: expected one of dim={dim}, experts={experts}"
            f"{'' if k is None else f', k={k}'}, got {gate.extra_repr()}"
        )
    return gate
