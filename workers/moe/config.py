"""What a mixture of experts is made of."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from torch import nn

from workers.moe.gate import Gate, require
from workers.ops.grouped_ffn import ACTIVATIONS

Activation = Literal["gelu", "relu", "silu", "swiglu"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The arguments of a `MoE` layer.

    Args:
        dim: width D of tokens.
        experts: number of experts E.
        hidden: hidden width H of an expert; 4 * dim unless given. Not with `expert`.
        k: experts for each token; the gate's default unless given (2, switch: 1).
        expert: makes one expert, any module [n, D] -> [n, D]; called E times.
        capacity_factor: an expert takes at most ceil(capacity_factor * T * k / E) tokens, the
            later ones lose that choice (contributing zero). None: nothing is dropped.
        balance_weight: factor of the gate's balance loss.
        seed: of the initial weights, and of what the gate draws in training; None takes torch's
            generator.
        gate: topk | switch | gshard | noisy | prototype | expert_choice | bias, or a Gate.
        activation: gelu | relu | silu | swiglu; the last makes `w1` [E, D, 2H]. Not with `expert`.
        shared_experts: experts made like the others, that every token passes; their outputs are
            added.
        z_weight: factor of the mean over tokens of logsumexp(logits)^2, which keeps logits small.
        chunks: parts in which rows travel, so that one is computed while another is under way.
        shadow: let every process compute an expert that is popular enough in a batch; see
            `workers.moe.shadowing`.
        gate_options: of the gate, such as {"score": "sigmoid"} of topk; see its class.

    Raises:
        ValueError: an argument out of range.
    """

    dim: int
    experts: int = 8
    hidden: int | None = None
    k: int | None = None
    expert: Callable[[], nn.Module] | None = None
    capacity_factor: float | None = None
    balance_weight: float = 0.01
    seed: int | None = None
    gate: str | Gate = "topk"
    activation: Activation = "gelu"
    shared_experts: int = 0
    z_weight: float = 0.0
    chunks: int = 1
    shadow: bool = False
    gate_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        hidden, expert, capacity = self.hidden, self.expert, self.capacity_factor
        self._require("dim", self.dim >= 1, "at least 1")
        self._require("experts", self.experts >= 1, "at least 1")
        self._require("hidden", hidden is None or hidden >= 1, "at least 1")
        self._require("hidden", hidden is None or expert is None, "None together with expert")
        limits = capacity is None or 0 < capacity < math.inf
        self._require("capacity_factor", limits, "None or a number above 0")
        self._require("balance_weight", self.balance_weight >= 0, "at least 0")
        self._require("z_weight", self.z_weight >= 0, "at least 0")
        self._require("shared_experts", self.shared_experts >= 0, "at least 0")
        names = ", ".join(ACTIVATIONS)
        self._require("activation", self.activation in ACTIVATIONS, f"one of {names}")
        plain = self.activation == "gelu" or expert is None
        self._require("activation", plain, "gelu, its default, together with expert")
        self._require("chunks", self.chunks >= 1, "at least 1")

    @classmethod
    def of(cls, **options: Any) -> "MoEConfig":
        """A configuration of its fields; what else is named is an option of the gate."""
        names = {f.name for f in fields(cls)} - {"gate_options"}
        own = {name: value for name, value in options.items() if name in names}
        return cls(**own, gate_options={n: v for n, v in options.items() if n not in names})

    def options(self) -> dict[str, Any]:
        """What `of` makes the same of."""
        own = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "gate_options"}
        return own | dict(self.gate_options)

    def _require(self, key: str, holds: bool, expected: str) -> None:
        require("MoE", key, getattr(self, key), holds, expected)
