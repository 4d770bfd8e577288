"""Layers without their experts, which are out of memory, and what is left of their state."""

from typing import Any

from torch import nn

from workers.moe.besides import is_besides
from workers.moe.layer import MoE


def strip(layer: MoE, name: str) -> None:
    """Take a layer's experts away from it."""
    if layer.experts is None:
        del layer.w1, layer.w2
    else:
        for module in layer.experts:
            _empty(module)

    def refuse_state(*_: Any) -> None:
        if is_besides():
            return
        raise RuntimeError(
            f"{name}: state_dict: its experts are out of memory; expected a model "
            "that is not offloaded"
        )

    def refuse_loading(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        own = (f"{prefix}w1", f"{prefix}w2", f"{prefix}experts.")
        if found := next((key for key in state if key.startswith(own)), None):
            raise RuntimeError(f"{found}: load_state_dict: the experts of {name} are out of memory")

    hooks: Any = layer
    hooks.register_state_dict_pre_hook(refuse_state)
    hooks.register_load_state_dict_pre_hook(refuse_loading)


def _empty(expert: nn.Module) -> None:
    """Leave an expert's parameters without memory; what is shared in it stays so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in expert.modules():
        for key, one in module._parameters.items():
            if one is not None:
                stub = nn.Parameter(one.detach().to("meta"), requires_grad=False)
                module._parameters[key] = made.setdefault(one, stub)
