"""A model whose blocks became mixtures of experts gives what it gave before."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import heterps
from heterps import aux_loss, moefy
from workers.moe.gates import TopK
from workers.moe.layer import MoE


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Residual(nn.Module):
    """Two blocks, one with dropouts, between layers that are none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(5, 6)
        self.first = nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 6, bias=False))
        self.second = nn.Sequential(
            nn.Linear(6, 8), nn.GELU(), nn.Dropout(0.3), nn.Linear(8, 6), nn.Dropout(0.2)
        )
        self.head = nn.Sequential(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.first(x)
        x = x + self.second(x)
        out: Tensor = self.head(x)
        return out


def encoder(norm_first: bool = False, activation: Any = "relu") -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(
        8, 2, 16, 0.1, activation, batch_first=True, norm_first=norm_first
    )
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not norm_first)


class Translator(nn.Module):
    """An encoder and a decoder over the same input."""

    def __init__(self) -> None:
        super().__init__()
        options: dict[str, Any] = {"activation": nn.SiLU(), "batch_first": True}
        self.transformer = nn.Transformer(8, 2, 1, 2, 12, **options)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.transformer(x, x.flip(1))
        return out


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], list[str]]] = {
    "residual": (Residual, (3, 4, 5), ["first", "second"]),
    "encoder": (encoder, (3, 7, 8), ["layers.0", "layers.1"]),
    "norm_first": (lambda: encoder(True, nn.SiLU()), (3, 7, 8), ["layers.0", "layers.1"]),
    "gelu": (lambda: encoder(False, "gelu"), (3, 7, 8), ["layers.0", "layers.1"]),
    "translator": (
        Translator,
        (3, 7, 8),
        [
            "transformer.encoder.layers.0",
            "transformer.decoder.layers.0",
            "transformer.decoder.layers.1",
        ],
    ),
    "sequential": (
        lambda: nn.Sequential(nn.Linear(5, 3), nn.ReLU(), nn.Linear(3, 5)),
        (2, 5),
        [""],
    ),
}


@pytest.fixture(params=MODELS)
def case(request: pytest.FixtureRequest) -> tuple[nn.Module, Tensor, list[str]]:
    make, shape, names = MODELS[request.param]
    torch.manual_seed(3)
    return make(), random(*shape), names


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")  # nn.Transformer cannot turn it off
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"k": 1},
        {"k": 3, "score": "sigmoid"},
        {"gate": "gshard"},
        {"gate": "noisy"},
        {"gate": "bias"},
    ],
)
def test_equals_the_original(
    case: tuple[nn.Module, Tensor, list[str]], options: dict[str, Any]
) -> None:
    model, x, names = case
    model.eval()
    plain = x.clone().requires_grad_()
    before = model(plain)
    assert moefy(model, experts=4, seed=1, **options) == names
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    assert len(layers) == len(names)
    assert not any(module.training for module in model.modules())
    routed = x.clone().requires_grad_()
    after = model(routed)
    torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-5)
    assert all(layer.load.sum() == layer.k * (x.numel() // x.shape[-1]) for layer in layers)
    direction = random(*before.shape, seed=2)
    (before_grad,) = torch.autograd.grad((before * direction).sum(), plain)
    (after_grad,) = torch.autograd.grad((after * direction).sum(), routed)
    torch.testing.assert_close(after_grad, before_grad, rtol=1e-3, atol=1e-5)
    with torch.no_grad():  # where torch's Transformer layers would take a fused kernel
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-5)
        for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            assert torch.equal(twin(x), model(x))


def test_padded_batches() -> None:
    torch.manual_seed(3)
    model, x = encoder().eval(), random(3, 7, 8)
    padding = torch.arange(7) >= torch.tensor([[7], [4], [2]])
    before = model(x, src_key_padding_mask=padding)
    moefy(model, experts=3, match="layers.1")
    for mode in (torch.enable_grad, torch.no_grad):
        with mode():
            after = model(x, src_key_padding_mask=padding)
        torch.testing.assert_close(after[~padding], before[~padding], rtol=1e-4, atol=1e-5)


def test_trains_every_part() -> None:
    torch.manual_seed(3)
    model, x = Residual(), random(64, 5)
    moefy(model, experts=3, k=2, gate="topk", renormalise=False, seed=0)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = (model(x).squeeze(1) - x.prod(dim=1)).square().mean()
        (loss + aux_loss(model)).backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] / 2
    for layer in (model.first.get_submodule("moe"), model.second.get_submodule("moe")):
        assert isinstance(layer, MoE)
        assert layer.experts is not None
        firsts = [next(expert.parameters()) for expert in layer.experts]
        assert not torch.equal(firsts[0], firsts[1])  # copies no more
        assert layer.gate.weight.grad is not None
        assert layer.gate.weight.grad.abs().sum() > 0


def test_match_takes_some() -> None:
    assert moefy(encoder(), match="*.1") == ["layers.1"]
    assert moefy(Residual(), match=lambda name, module: len(list(module.children())) == 5) == [
        "second"
    ]


def test_options_reach_the_layers() -> None:
    model = Residual().double().train()
    frozen = model.first[0].weight.requires_grad_(False)
    moefy(model, 5, 2, gate="bias", rate=0.5, shared_experts=1, capacity_factor=2.0, seed=4)
    first, second = (module for module in model.modules() if isinstance(module, MoE))
    assert (first.num_experts, first.k, first.shared_experts) == (5, 2, 1)
    assert (first.gate.rate, first.capacity_factor) == (0.5, 2.0)
    assert first.gate.weight.dtype == torch.float64
    assert not torch.equal(first.gate.weight, second.gate.weight)
    assert first.training
    assert first.experts is not None
    weights = [expert.get_parameter("0.weight") for expert in first.experts]
    assert all(torch.equal(weight, frozen) for weight in weights)
    assert not any(weight.requires_grad for weight in weights)
    assert len({weight.data_ptr() for weight in weights}) == 5


def test_aux_loss_sums_all_layers() -> None:
    model, x = Residual(), random(9, 5)
    assert aux_loss(model).item() == 0
    moefy(model, experts=3, z_weight=0.1)
    model(x)
    losses = [module.aux_loss for module in model.modules() if isinstance(module, MoE)]
    assert len(losses) == 2
    torch.testing.assert_close(aux_loss(model), losses[0] + losses[1])
    aux_loss(model).backward()
    assert model.first.get_submodule("moe.gate").weight.grad.abs().sum() > 0


def test_state_dict_round_trip() -> None:
    model, other = Residual().eval(), Residual().eval()
    moefy(model, seed=0)
    moefy(other, seed=1)
    other.load_state_dict(model.state_dict())
    x = random(7, 5)
    assert torch.equal(other(x), model(x))


class Gated(nn.Sequential):
    """Not the sequence of its children."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x * super().forward(x)
        return out


@pytest.mark.parametrize(
    "model",
    [
        nn.Linear(3, 3),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)),
        nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 3)),
        nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)),
        Gated(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)),
    ],
)
def test_refuses_models_without_blocks(model: nn.Module) -> None:
    with pytest.raises(ValueError, match=f"{type(model).__name__} has no feed-forward block;"):
        moefy(model)


def test_leaves_a_moe_as_it_is() -> None:
    model = Residual()
    moefy(model)
    with pytest.raises(ValueError, match="no feed-forward block;"):
        moefy(model)


def test_refuses_arguments() -> None:
    model = Residual()
    parts = [id(module) for module in model.modules()]
    with pytest.raises(ValueError, match=r"no feed-forward block that matches 'body\.\*';"):
        moefy(model, match="body.*")
    with pytest.raises(ValueError, match=r"k: expected 1 to 2 \(experts\), got 3"):
        moefy(model, 2, 3)
    with pytest.raises(TypeError, match="moefy: hidden: expected none, the block sets it"):
        moefy(model, hidden=3)
    with pytest.raises(TypeError, match="moefy: gate: expected a name"):
        moefy(model, gate=TopK(6, 8))
    assert [id(module) for module in model.modules()] == parts


def test_heterps_exports_them() -> None:
    assert heterps.moefy is moefy
    assert "moefy" in heterps.__all__
