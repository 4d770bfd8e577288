"""The mixture of experts against a loop over tokens and experts in float64."""

import copy
import math
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from workers.moe.layer import MoE


def reference(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor, list[int]]:
    """(output, auxiliary loss, load), token by token; differentiable."""
    logits = x @ moe.gate.weight.T
    experts, k = moe.num_experts, moe.k
    capacity = math.inf
    if moe.capacity_factor is not None:
        capacity = math.ceil(moe.capacity_factor * len(x) * k / experts)
    load, outputs = [0] * experts, []
    for token, row in zip(x, logits, strict=True):
        best = sorted(range(experts), key=lambda e: (-row[e].item(), e))[:k]
        probability = row.softmax(0)[best]
        total = torch.zeros_like(token)
        for weight, e in zip(probability / probability.sum(), best, strict=True):
            load[e] += 1
            if load[e] <= capacity:
                total = total + weight * apply_expert(moe, e, token)
        outputs.append(total)
    if not outputs:
        return x * 0, x.sum() * 0, load
    mean = logits.softmax(1).mean(0)
    share = torch.tensor(load, dtype=x.dtype) / (len(x) * k)
    return torch.stack(outputs), moe.balance_weight * experts * (share * mean).sum(), load


def apply_expert(moe: MoE, e: int, token: Tensor) -> Tensor:
    if moe.experts is not None:
        out: Tensor = moe.experts[e](token[None])[0]
        return out
    return F.gelu(token @ moe.w1[e]) @ moe.w2[e]


def gradients(loss: Tensor, inputs: list[Tensor]) -> list[Tensor]:
    grads = torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)
    return [grad.double() for grad in grads]


def check(moe: MoE, x: Tensor, tolerance: float = 2e-5) -> None:
    """Output, load, auxiliary loss and every gradient."""
    wide = copy.deepcopy(moe).double()
    inputs, wide_inputs = x.clone().requires_grad_(), x.double().requires_grad_()
    out = moe(inputs)
    expected, aux, load = reference(wide, wide_inputs)
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(moe.aux_loss.double(), aux, rtol=tolerance, atol=tolerance)
    assert moe.load.tolist() == load
    assert moe.load.dtype == torch.int64
    direction = torch.randn(out.shape, generator=torch.Generator().manual_seed(0))
    got = gradients((out * direction).sum() + moe.aux_loss, [inputs, *moe.parameters()])
    want = gradients((expected * direction).sum() + aux, [wide_inputs, *wide.parameters()])
    for mine, theirs in zip(got, want, strict=True):
        scale = max(1.0, theirs.abs().max().item() if theirs.numel() else 1.0)
        torch.testing.assert_close(mine, theirs, rtol=0, atol=tolerance * scale)


def random_tokens(tokens: int, dim: int, seed: int = 0) -> Tensor:
    return torch.randn(tokens, dim, generator=torch.Generator().manual_seed(seed))


@given(
    tokens=st.integers(0, 20),
    dim=st.integers(1, 11),
    experts=st.integers(1, 6),
    hidden=st.integers(1, 13),
    capacity_factor=st.sampled_from([None, 0.5, 1.0, 1.25]),
    data=st.data(),
)
@settings(max_examples=40)
def test_equals_the_reference(
    tokens: int, dim: int, experts: int, hidden: int, capacity_factor: float | None, data: Any
) -> None:
    k = data.draw(st.integers(1, experts))
    moe = MoE(dim, experts, hidden, k, capacity_factor=capacity_factor, seed=1)
    check(moe, random_tokens(tokens, dim))


def test_one_expert_takes_all() -> None:
    moe = MoE(5, experts=7, k=1, seed=0)
    with torch.no_grad():
        moe.gate.weight.zero_()
    check(moe, random_tokens(33, 5))
    assert moe.load.tolist() == [33, 0, 0, 0, 0, 0, 0]
    assert moe.w1.grad is None


def test_four_of_sixteen_experts_take_most() -> None:
    moe = MoE(8, experts=16, hidden=12, k=2, seed=0)
    x = random_tokens(80, 8)
    x[:, 0] = 3  # a constant feature, by which the gate favours every fourth expert
    with torch.no_grad():
        moe.gate.weight[::4, 0] = 1
    check(moe, x)
    assert moe.load[::4].sum() > 0.7 * moe.load.sum()


def test_even_load_costs_the_balance_weight() -> None:
    moe = MoE(4, experts=4, k=4, balance_weight=0.5, seed=0)
    moe(random_tokens(10, 4))
    assert moe.aux_loss.item() == pytest.approx(0.5)


def test_any_module_can_be_an_expert() -> None:
    moe = MoE(
        6, experts=3, expert=lambda: nn.Sequential(nn.Linear(6, 2), nn.Tanh(), nn.Linear(2, 6))
    )
    check(moe, random_tokens(17, 6))
    check(moe, random_tokens(0, 6))


@pytest.mark.parametrize("capacity_factor", [None, 0.75])
def test_gradcheck(capacity_factor: float | None) -> None:
    moe = MoE(3, experts=4, hidden=5, capacity_factor=capacity_factor, seed=2).double()
    x = random_tokens(6, 3).double().requires_grad_()
    names, parameters = zip(*moe.named_parameters(), strict=True)

    def function(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(moe, dict(zip(names, values, strict=True)), (x,))
        return out, moe.aux_loss

    assert torch.autograd.gradcheck(function, (x, *parameters))


def test_seed_fixes_the_weights_and_leaves_the_generator() -> None:
    before = torch.random.get_rng_state()
    first, second, other = MoE(4, seed=5), MoE(4, seed=5), MoE(4, seed=6)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(map(torch.equal, first.parameters(), second.parameters()))
    assert not torch.equal(first.w1, other.w1)


def test_equal_bits_on_every_run() -> None:
    moe, x = MoE(32, seed=0), random_tokens(300, 32).requires_grad_()

    def run() -> list[Tensor]:
        out = moe(x)
        return [
            out,
            *torch.autograd.grad(out.square().sum() + moe.aux_loss, [x, *moe.parameters()]),
        ]

    first = run()
    assert all(map(torch.equal, first, run()))


def test_half_precision_routes_in_float32() -> None:
    moe, x = MoE(16, seed=0).bfloat16(), random_tokens(50, 16).bfloat16()
    out = moe(x)
    expected, _, load = reference(copy.deepcopy(moe).float(), x.float())
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), expected, rtol=5e-2, atol=5e-2)
    assert moe.load.tolist() == load


def test_autocast_keeps_the_routing() -> None:
    moe, x = MoE(16, seed=0), random_tokens(50, 16)
    plain, load = moe(x), moe.load
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = moe(x)
    assert torch.equal(load, moe.load)
    torch.testing.assert_close(out.float(), plain, rtol=5e-2, atol=5e-2)


def test_copies_and_pickles_after_a_step() -> None:
    moe, x = MoE(4, seed=0), random_tokens(9, 4)
    out = moe(x)
    for twin in (copy.deepcopy(moe), pickle.loads(pickle.dumps(moe))):
        assert torch.equal(twin(x), out)
        assert torch.equal(twin.load, moe.load)
    assert moe.aux_loss.requires_grad


def test_balance_loss_spreads_the_load() -> None:
    moe, x = MoE(8, experts=4, k=1, balance_weight=1.0, seed=0), random_tokens(256, 8)
    x[:, 0] = 1  # a constant feature, by which the gate sends everything to expert 0
    with torch.no_grad():
        moe.gate.weight[0, 0] = 5
    moe(x)
    assert moe.load[0] == 256
    optimizer = torch.optim.SGD(moe.gate.parameters(), lr=0.3)
    for _ in range(100):
        optimizer.zero_grad()
        moe(x)
        moe.aux_loss.backward()
        optimizer.step()
    assert moe.load.max() < 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 0}, "dim: expected at least 1, got 0"),
        ({"experts": 0}, "experts: expected at least 1"),
        ({"experts": 2, "k": 3}, r"k: expected 1 to 2 \(experts\), got 3"),
        ({"hidden": 0}, "hidden: expected at least 1"),
        ({"hidden": 4, "expert": nn.Identity}, "hidden: expected None together with expert"),
        ({"capacity_factor": 0.0}, "capacity_factor: expected None or a number above 0"),
        ({"balance_weight": -1.0}, "balance_weight: expected at least 0"),
    ],
)
def test_refuses_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(**({"dim": 4} | arguments))


def test_a_configuration_makes_the_same_layer() -> None:
    config = MoE.Config(
        dim=6, experts=5, gate="switch", z_weight=0.1, seed=3, gate_options={"jitter": 0.2}
    )
    same = MoE(6, experts=5, gate="switch", jitter=0.2, z_weight=0.1, seed=3)
    layer, x = MoE.from_config(config), random_tokens(20, 6)
    assert layer.gate.jitter == 0.2
    assert torch.equal(layer(x), same(x))
    assert layer.aux_loss == same.aux_loss
    assert MoE.Config.of(**config.options()) == config


@pytest.mark.parametrize("shape", [(4,), (2, 3), (2, 2, 4)])
def test_refuses_inputs(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"x: expected \[tokens, 4\]"):
        MoE(4)(torch.zeros(shape))


def test_one_op_gives_what_the_gate_and_experts_give_one_by_one() -> None:
    """To the bit, beside a residual too; a gate that somebody watches is called for itself."""
    torch.manual_seed(0)
    layer = MoE(24, experts=8, hidden=20, k=3, activation="swiglu", balance_weight=0.1)
    watched = copy.deepcopy(layer)
    seen: list[int] = []
    watched.gate.register_forward_hook(lambda *_: seen.append(1))
    x = torch.randn(90, 24)
    found = []
    for one in (layer, watched):
        tokens = x.clone().requires_grad_()
        out = tokens + one(torch.tanh(tokens))
        (out.square().sum() + one.aux_loss).backward()
        gradients = [p.grad for p in (tokens, *one.parameters())]
        found.append([out, one.aux_loss, one.load, one.stats().load, *gradients])
    assert seen == [1]
    for mine, same in zip(*found, strict=True):
        assert torch.equal(mine, same)
