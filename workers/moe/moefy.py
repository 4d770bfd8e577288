"""Turns the feed-forward blocks of a plain model into mixtures of experts that begin as copies."""

import copy
import fnmatch
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workers.moe.gates import Gate
from workers.moe.layer import MoE

Match = str | Callable[[str, nn.Module], bool]

_TRANSFORMER_LAYERS = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)
_DROPOUTS = (nn.Dropout, nn.AlphaDropout, nn.FeatureAlphaDropout)
_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish, nn.Hardtanh, nn.PReLU),
)


class FeedForward(nn.Module):
    """The feed-forward block of one of torch's Transformer layers, as a module of its own."""

    def __init__(
        self,
        linear1: nn.Module,
        activation: Callable[[Tensor], Tensor],
        dropout: nn.Module,
        linear2: nn.Module,
    ) -> None:
        super().__init__()
        self.linear1, self.dropout, self.linear2 = linear1, dropout, linear2
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]."""
        out: Tensor = self.linear2(self.dropout(self.activation(self.linear1(x))))
        return out


class BlockMoE(MoE):
    """A MoE in place of a block that took [..., D]: leading dimensions count as tokens."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., D] to [..., D]; sets `aux_loss` and `load`."""
        out = super().forward(x.reshape(-1, x.shape[-1]))
        return out.reshape(x.shape)


@dataclass(frozen=True, slots=True)
class _Block:
    """A feed-forward block of the model."""

    name: str
    module: nn.Module  # holds it, and will hold the MoE
    original: nn.Module
    first: nn.Linear


def moefy(
    model: nn.Module,
    experts: int = 8,
    k: int | None = None,
    match: Match | None = None,
    **options: Any,
) -> list[str]:
    """Replaces the feed-forward blocks of `model`, in place, by MoE layers whose experts copy them.

    Blocks are those of torch's Transformer encoder and decoder layers, and every nn.Sequential of
    Linear, activation, Linear with Dropouts or none after the last two, as wide out as in. Where
    the weights of a token's choices sum to one (gates topk, bias, noisy, and gshard in
    evaluation), nothing is dropped and no expert is shared, the model then gives what it gave
    before. Take the optimizer's parameters after this call. The MoE is `linear1` of a Transformer
    layer, and the only child, `moe`, of a Sequential.

    Args:
        model: changed in place. What is in a MoE already stays.
        experts: experts of each layer.
        k: experts for each token; the gate's default unless given.
        match: which blocks: a pattern of their names, such as "encoder.layers.*", or a function of
            name and module. None takes all.
        options: of MoE, but for dim, hidden, expert and activation. A `seed` is that of the first
            layer; each further one adds 1.

    Returns:
        The names of the replaced blocks: of the Transformer layer or the Sequential.

    Raises:
        ValueError: no block matches, or an option is out of range.
        TypeError: an option is one that the block sets, or a Gate, which fits a single layer.
    """
    for key in ("dim", "hidden", "expert", "activation"):
        if key in options:
            raise TypeError(f"moefy: {key}: expected none, the block sets it")
    if isinstance(options.get("gate"), Gate):
        raise TypeError("moefy: gate: expected a name, so that each layer gets its own")
    seed = options.pop("seed", None)
    blocks = [block for block in _blocks(model) if _matches(match, block)]
    if not blocks:
        among = "" if match is None else f" that matches {match!r}"
        raise ValueError(
            f"moefy: {type(model).__name__} has no feed-forward block{among}; expected a torch "
            "Transformer layer or an nn.Sequential of Linear, activation, Linear, as wide out as in"
        )
    # All are made before any is put in place: an error leaves the model as it was.
    layers = [
        _layer(block, experts, k, None if seed is None else seed + index, options)
        for index, block in enumerate(blocks)
    ]
    for block, layer in zip(blocks, layers, strict=True):
        _put(block.module, layer)
    _keep_from_nested_tensors(model)
    return [block.name for block in blocks]


def _blocks(model: nn.Module) -> list[_Block]:
    inside = [f"{name}." for name, module in model.named_modules() if isinstance(module, MoE)]
    blocks = []
    for name, module in model.named_modules():
        original = _original(module)
        if original is None or name.startswith(tuple(inside)):
            continue
        linears = [m for m in original.modules() if isinstance(m, nn.Linear)]
        if linears[0].in_features == linears[-1].out_features:
            blocks.append(_Block(name, module, original, linears[0]))
    return blocks


def _original(module: nn.Module) -> nn.Module | None:
    """The feed-forward block that a module holds, its first Linear before its last."""
    if isinstance(module, _TRANSFORMER_LAYERS):
        if {_kind(module.linear1), _kind(module.linear2)} != {"linear"}:
            return None
        return FeedForward(module.linear1, module.activation, module.dropout, module.linear2)
    # A subclass with a forward of its own may do something else.
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward:
        kinds = [_kind(child) for child in module]
        if kinds[:2] == ["linear", "activation"] and kinds[2:] in (
            ["linear"],
            ["dropout", "linear"],
            ["linear", "dropout"],
            ["dropout", "linear", "dropout"],
        ):
            return nn.Sequential(*module)
    return None


def _kind(module: nn.Module) -> str:
    if isinstance(module, nn.Linear):
        return "linear"
    if isinstance(module, _DROPOUTS):
        return "dropout"
    return "activation" if isinstance(module, _ACTIVATIONS) else "other"


def _matches(match: Match | None, block: _Block) -> bool:
    if match is None:
        return True
    if isinstance(match, str):
        return fnmatch.fnmatchcase(block.name, match)
    return match(block.name, block.module)


def _layer(
    block: _Block, experts: int, k: int | None, seed: int | None, options: dict[str, Any]
) -> BlockMoE:
    weight = block.first.weight
    layer = BlockMoE(
        block.first.in_features,
        experts,
        k=k,
        expert=lambda: copy.deepcopy(block.original),
        seed=seed,
        **options,
    )
    layer.gate.to(weight.device, weight.dtype)
    return layer.train(block.module.training)


def _put(module: Any, layer: BlockMoE) -> None:
    if isinstance(module, nn.Sequential):
        for name in list(module._modules):
            delattr(module, name)
        module.add_module("moe", layer)
        return
    module.linear1 = layer
    # The experts do the rest; the dropout after them stays with the Transformer layer.
    module.dropout = nn.Identity().train(module.training)
    module.linear2 = nn.Identity().train(module.training)
    # Not a module: copies of a decoder layer whose activation is one take torch's ReLU instead.
    del module.activation
    module.activation = _identity
    if isinstance(module, nn.TransformerEncoderLayer):
        # Says that torch's fused kernel, which reads linear1.weight, does not apply.
        module.activation_relu_or_gelu = 0


def _identity(x: Tensor) -> Tensor:
    return x


def _keep_from_nested_tensors(model: nn.Module) -> None:
    """Encoders make padded batches nested tensors for that kernel, and look at layer 0 alone."""
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and any(
            isinstance(m, BlockMoE) for m in module.modules()
        ):
            module.use_nested_tensor = False
