"""Every gate against loops over tokens and experts in float64."""

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from workers import ops
from workers.moe.gates import GATES, Bias, Gate, TopK
from workers.moe.layer import MoE

Pairs = list[tuple[int, Tensor]]  # of a token: (expert, weight), dropped ones left out
SHAPES = [(0, 3), (1, 1), (1, 4), (13, 1), (17, 4), (40, 6)]


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- the definitions: logits [T, E] to each token's pairs, and the balance loss -------------------


def ranked(row: Tensor) -> list[int]:
    return sorted(range(len(row)), key=lambda e: (-row[e].item(), e))


def switch_loss(firsts: list[int], logits: Tensor) -> Tensor:
    experts = logits.shape[1]
    total = logits.sum() * 0
    for e in range(experts):
        share = firsts.count(e) / max(1, len(firsts))
        total = total + share * sum(row.softmax(0)[e] for row in logits) / max(1, len(logits))
    return experts * total


def topk(moe: MoE, logits: Tensor) -> tuple[list[Pairs], Tensor]:
    gate = moe.gate
    assert isinstance(gate, TopK)
    pairs: list[Pairs] = []
    for row in logits:
        score = row.sigmoid() if gate.score == "sigmoid" else row.softmax(0)
        best = ranked(row)[: moe.k]
        total = sum(score[e] for e in best) if gate.renormalise else 1
        pairs.append([(e, score[e] / total) for e in best])
    chosen = [e for token in pairs for e, _ in token]
    scores = logits.sigmoid().log() if gate.score == "sigmoid" else logits
    return pairs, switch_loss(chosen, scores)


def gshard(moe: MoE, logits: Tensor) -> tuple[list[Pairs], Tensor]:
    pairs: list[Pairs] = []
    for row in logits:
        first, second = ranked(row)[:2]
        g1, g2 = row.softmax(0)[[first, second]]
        pairs.append([(first, g1 / (g1 + g2)), (second, g2 / (g1 + g2))])
    return pairs, switch_loss([token[0][0] for token in pairs], logits)


def cv2(values: list[Tensor]) -> Tensor:
    mean = sum(values, torch.zeros(())) / len(values)
    variance = sum(((v - mean) ** 2 for v in values), torch.zeros(())) / len(values)
    return variance / (mean**2 + 1e-10)


def noisy(moe: MoE, logits: Tensor) -> tuple[list[Pairs], Tensor]:
    pairs: list[Pairs] = []
    for row in logits:
        best = ranked(row)[: moe.k]
        pairs.append(list(zip(best, row[best].softmax(0), strict=True)))
    importance = [logits.sum() * 0 for _ in range(moe.num_experts)]
    load = [torch.zeros((), dtype=torch.float64) for _ in range(moe.num_experts)]
    for e, weight in (pair for token in pairs for pair in token):
        importance[e] = importance[e] + weight
        load[e] = load[e] + 1
    return pairs, cv2(importance) + cv2(load)


def prototype(moe: MoE, logits: Tensor) -> tuple[list[Pairs], Tensor]:
    size = moe.num_experts // moe.k
    pairs: list[Pairs] = [[] for _ in logits]
    loss = logits.sum() * 0
    for group in range(moe.k):
        part = logits[:, group * size : (group + 1) * size]
        best = [ranked(row)[0] for row in part]
        for token, e, row in zip(pairs, best, part, strict=True):
            token.append((group * size + e, row.softmax(0)[e]))
        loss = loss + switch_loss(best, part) / moe.k
    return pairs, loss


def expert_choice(moe: MoE, logits: Tensor) -> tuple[list[Pairs], Tensor]:
    capacity = math.ceil(moe.k * len(logits) / moe.num_experts)
    pairs: list[Pairs] = [[] for _ in logits]
    if len(logits):
        score = logits.softmax(1)
        for e in range(moe.num_experts):
            for t in ranked(score[:, e])[:capacity]:
                pairs[t].append((e, score[t, e]))
    return pairs, logits.sum() * 0


def bias(moe: MoE, logits: Tensor) -> tuple[list[Pairs], Tensor]:
    gate = moe.gate
    assert isinstance(gate, Bias)
    pairs: list[Pairs] = []
    for row in logits:
        score = row.sigmoid()
        best = ranked(score + gate.bias)[: moe.k]
        total = sum(score[e] for e in best)
        pairs.append([(e, score[e] / total) for e in best])
    return pairs, logits.sum() * 0


DEFINITIONS: dict[str, Callable[[MoE, Tensor], tuple[list[Pairs], Tensor]]] = {
    "topk": topk,
    "switch": topk,
    "gshard": gshard,
    "noisy": noisy,
    "prototype": prototype,
    "expert_choice": expert_choice,
    "bias": bias,
}


def expert(moe: MoE, w1: Tensor, w2: Tensor, token: Tensor) -> Tensor:
    hidden = token @ w1
    if moe.activation == "swiglu":
        half = len(hidden) // 2
        return (F.silu(hidden[:half]) * hidden[half:]) @ w2
    activations = {"gelu": F.gelu, "relu": F.relu, "silu": F.silu}
    return activations[moe.activation](hidden) @ w2


def check(moe: MoE, name: str, x: Tensor, tolerance: float = 3e-5) -> None:
    """Output, load, auxiliary loss, statistics and every gradient."""
    wide = copy.deepcopy(moe).double()
    inputs, wide_inputs = x.clone().requires_grad_(), x.double().requires_grad_()
    out = moe(inputs)

    logits = wide_inputs @ wide.gate.weight.T
    pairs, balance = DEFINITIONS[name](wide, logits)
    capacity: float = math.inf
    if moe.capacity_factor is not None:
        capacity = math.ceil(moe.capacity_factor * len(x) * moe.k / moe.num_experts)
    sent, taken = [0] * moe.num_experts, [0] * moe.num_experts
    expected = [token * 0 for token in wide_inputs]
    # GShard serves all first choices before any second one; the others go by tokens.
    order = [(t, c) for t, token in enumerate(pairs) for c in range(len(token))]
    if name == "gshard":
        order.sort(key=lambda pair: pair[1])
    for t, c in order:
        e, weight = pairs[t][c]
        sent[e] += 1
        if taken[e] < capacity:
            taken[e] += 1
            token = wide_inputs[t]
            expected[t] = expected[t] + weight * expert(wide, wide.w1[e], wide.w2[e], token)
    for s in range(moe.shared_experts):
        for t, token in enumerate(wide_inputs):
            shared = expert(wide, wide.shared_w1[s], wide.shared_w2[s], token)
            expected[t] = expected[t] + shared
    z = sum((row.exp().sum().log() ** 2 for row in logits), torch.zeros(()))
    aux = moe.balance_weight * balance + moe.z_weight * z / max(1, len(x))
    want_out = torch.stack(expected) if expected else wide_inputs * 0

    torch.testing.assert_close(out.double(), want_out, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(moe.aux_loss.double(), aux.double(), rtol=tolerance, atol=tolerance)
    assert moe.load.tolist() == sent
    assert moe.stats().dropped == pytest.approx(1 - sum(taken) / sum(sent) if len(x) else 0)

    direction = random(*out.shape, seed=1)
    got_in = [inputs, *moe.parameters()]
    want_in = [wide_inputs, *wide.parameters()]
    options = {"allow_unused": True, "materialize_grads": True}
    got = torch.autograd.grad((out * direction).sum() + moe.aux_loss, got_in, **options)
    want = torch.autograd.grad((want_out * direction).sum() + aux, want_in, **options)
    for mine, theirs in zip(got, want, strict=True):
        scale = max(1.0, theirs.abs().max().item() if theirs.numel() else 1.0)
        torch.testing.assert_close(mine.double(), theirs, rtol=0, atol=tolerance * scale)


def choices(name: str, experts: int) -> list[int]:
    """The k that a gate takes with so many experts."""
    if name == "switch":
        return [1]
    if name == "gshard":
        return [2] if experts >= 2 else []
    if name == "prototype":
        return [k for k in range(1, experts + 1) if experts % k == 0]
    return list(range(1, experts + 1))


# --- in evaluation, where nothing is drawn --------------------------------------------------------


CASES = [
    (name, tokens, experts, k)
    for name in GATES
    for tokens, experts in SHAPES
    for k in sorted({*choices(name, experts)[:2], *choices(name, experts)[-1:]})
]


@pytest.mark.parametrize(("name", "tokens", "experts", "k"), CASES)
def test_equals_its_definition(name: str, tokens: int, experts: int, k: int) -> None:
    moe = MoE(5, experts, 3, k, gate=name, seed=1, balance_weight=0.3, z_weight=0.1).eval()
    check(moe, name, random(tokens, 5, seed=tokens))


@given(tokens=st.integers(0, 20), experts=st.integers(1, 6), data=st.data())
@settings(max_examples=40)
def test_any_shape_and_option_equals_its_definition(
    tokens: int, experts: int, data: st.DataObject
) -> None:
    name = data.draw(st.sampled_from([n for n in GATES if choices(n, experts)]))
    options: dict[str, Any] = {}
    if name == "topk":
        options["score"] = data.draw(st.sampled_from(["softmax", "sigmoid"]))
        options["renormalise"] = data.draw(st.booleans())
    if name != "expert_choice":
        options["capacity_factor"] = data.draw(st.sampled_from([None, 0.5, 1.0]))
    moe = MoE(
        4,
        experts,
        3,
        data.draw(st.sampled_from(choices(name, experts))),
        gate=name,
        activation=data.draw(st.sampled_from(["gelu", "relu", "silu", "swiglu"])),
        shared_experts=data.draw(st.integers(0, 2)),
        z_weight=0.5,
        seed=2,
        **options,
    ).eval()
    check(moe, name, random(tokens, 4, seed=3))


@pytest.mark.parametrize("name", GATES)
def test_experts_without_tokens(name: str) -> None:
    moe = MoE(3, experts=6, hidden=2, gate=name, seed=0).eval()
    with torch.no_grad():
        moe.gate.weight.zero_()  # equal scores: the lower experts, or of equal tokens the first
    check(moe, name, random(5, 3))
    if name != "expert_choice":
        assert 0 in moe.load


@pytest.mark.parametrize("name", GATES)
def test_gradcheck(name: str) -> None:
    moe = MoE(3, experts=4, hidden=2, gate=name, z_weight=0.1, shared_experts=1, seed=2)
    moe = moe.double().eval()
    x = random(6, 3).double().requires_grad_()
    names, parameters = zip(*moe.named_parameters(), strict=True)

    def function(x: Tensor, *values: Tensor) -> tuple[Tensor, Tensor]:
        out = torch.func.functional_call(moe, dict(zip(names, values, strict=True)), (x,))
        return out, moe.aux_loss

    assert torch.autograd.gradcheck(function, (x, *parameters))


def test_one_prototype_is_switch() -> None:
    one, other = (MoE(6, 5, k=1, gate=gate, seed=3).eval() for gate in ("prototype", "switch"))
    x = random(30, 6)
    assert torch.equal(one(x), other(x))
    assert torch.equal(one.load, other.load)
    torch.testing.assert_close(one.aux_loss, other.aux_loss)


def test_each_token_meets_one_expert_of_every_prototype() -> None:
    moe = MoE(6, experts=12, k=3, gate="prototype", seed=3)
    moe(random(50, 6))
    assert moe.load.reshape(3, 4).sum(1).tolist() == [50, 50, 50]


def test_expert_choice_fills_every_expert() -> None:
    moe = MoE(6, experts=4, k=2, gate="expert_choice", seed=3)
    moe(random(31, 6))
    assert moe.load.tolist() == [16, 16, 16, 16]


def test_extreme_sigmoids_renormalise() -> None:
    moe = MoE(2, experts=3, hidden=2, k=2, gate="topk", score="sigmoid", seed=0)
    x = torch.tensor([[500.0, 500.0], [-500.0, -500.0]])
    with torch.no_grad():
        moe.gate.weight.copy_(torch.tensor([[-1.0, -1.0], [-1.0, -1.0], [-2.0, -2.0]]))
    decision = moe.gate(x, 0.0)
    torch.testing.assert_close(decision.weights, torch.full((2, 2), 0.5))


# --- in training ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATES)
def test_draws_follow_the_seed_in_training_alone(name: str) -> None:
    options = {"jitter": 0.5} if name == "switch" else {}
    draws = name in ("switch", "gshard", "noisy")
    first, second = (MoE(6, gate=name, seed=7, **options) for _ in range(2))
    other = copy.deepcopy(first)
    assert other.gate.seed is not None
    other.gate.seed += 1
    x = random(64, 6)
    before = torch.random.get_rng_state()
    outs = [first(x), first(x)]
    assert all(map(torch.equal, outs, [second(x), second(x)]))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.equal(outs[0], outs[1]) is not draws
    assert torch.equal(outs[0], other(x)) is not draws
    # A copy and a pickle go on where the original is.
    twins = [copy.deepcopy(first), pickle.loads(pickle.dumps(first))]
    following = first(x)
    assert all(torch.equal(twin(x), following) for twin in twins)
    first.eval()
    assert torch.equal(first(x), first(x))
    assert torch.equal(first(x), other.eval()(x))


@pytest.mark.parametrize("name", ["switch", "gshard", "noisy"])
def test_without_a_seed_torch_draws(name: str) -> None:
    moe, x = MoE(6, gate=name), random(64, 6)
    torch.manual_seed(1)
    first = moe(x)
    assert not torch.equal(moe(x), first)
    torch.manual_seed(1)
    assert torch.equal(moe(x), first)


def test_switch_jitters_what_the_gate_sees() -> None:
    moe, x = MoE(40, gate="switch", jitter=0.1, seed=0), torch.ones(500, 40)
    seen = moe.gate.logits(x)
    plain = x @ moe.gate.weight.T
    spread = 0.1 / math.sqrt(3) * moe.gate.weight.norm(dim=1)  # of a sum of uniform factors
    torch.testing.assert_close((seen - plain).std(dim=0), spread, rtol=0.15, atol=0)
    assert (seen - plain).abs().max() <= 0.1 * moe.gate.weight.abs().sum(dim=1).max()
    check(MoE(4, gate="switch", jitter=0.0), "switch", random(20, 4))  # without jitter, as in eval


def test_gshard_takes_the_second_by_its_weight() -> None:
    moe = MoE(1, experts=3, hidden=1, gate="gshard", seed=0)
    with torch.no_grad():  # of a one: g2 = 0.2, taken with probability 0.4
        moe.gate.weight.copy_(torch.tensor([[math.log(0.8)], [math.log(0.2)], [-9.0]]))
    x = torch.ones(4000, 1)
    decision = moe.gate(x, 0.01)
    first, second, third = decision.routing.counts.tolist()
    assert (first, third) == (4000, 0)
    assert abs(second - 1600) < 5 * math.sqrt(4000 * 0.4 * 0.6)
    torch.testing.assert_close(decision.weights, torch.tensor([0.8, 0.2]).expand(4000, 2))


def test_gshard_serves_first_choices_first() -> None:
    routing = ops.route(torch.tensor([[5.0, 9, 0], [9, 5, 0], [9, 0, 5]]), 2)
    assert routing.limited(2, first_choices_first=True).inverse.tolist() == [2, -1, 0, 3, 1, 4]
    assert routing.limited(2).inverse.tolist() == [2, 0, 1, 3, -1, 4]


def test_only_keeps_the_rows_in_order() -> None:
    routing = ops.route(torch.tensor([[9.0, 5, 0], [5, 9, 0]]), 2)
    routing = routing.only(torch.tensor([[True, False], [True, True]]))
    assert routing.order.tolist() == [0, 3, 2]
    assert routing.inverse.tolist() == [0, -1, 2, 1]
    assert routing.offsets.tolist() == [0, 2, 3, 3]


@pytest.mark.parametrize(("experts", "k"), [(5, 1), (5, 3), (3, 3), (1, 1)])
def test_noisy_training_equals_its_definition(experts: int, k: int) -> None:
    moe = MoE(4, experts, 3, k, gate="noisy", seed=5, balance_weight=0.7).double()
    gate: Any = moe.gate
    nn.init.normal_(gate.noise, generator=torch.Generator().manual_seed(1))
    twin, x = copy.deepcopy(gate), random(23, 4).double()
    decision = gate(x, 0.7)
    # The same draws, by the definition.
    twin.draws += 1
    seed = (twin.seed + twin.draws * 0x9E3779B97F4A7C15) % 2**63
    normal = torch.empty(23, experts, dtype=torch.float64)
    normal.normal_(generator=torch.Generator().manual_seed(seed))
    clean, std = x @ twin.weight.T, F.softplus(x @ twin.noise.T) + 0.01
    logits = clean + std * normal
    importance = [torch.zeros(()).double() for _ in range(experts)]
    load = [torch.zeros(()).double() for _ in range(experts)]
    for t, row in enumerate(logits):
        best = ranked(row)[:k]
        torch.testing.assert_close(decision.weights[t], row[best].softmax(0))
        assert decision.routing.chosen[t].tolist() == best
        for e in range(experts):
            if e in best:
                importance[e] = importance[e] + row[best].softmax(0)[best.index(e)]
            others = sorted((row[o] for o in range(experts) if o != e), reverse=True)
            if k < experts:
                z = (clean[t, e] - others[k - 1]) / std[t, e]
                load[e] = load[e] + (1 + torch.erf(z / math.sqrt(2))) / 2
            else:
                load[e] = load[e] + 1
    loss = 0.7 * (cv2(importance) + cv2(load))
    torch.testing.assert_close(decision.balance, loss)
    got = torch.autograd.grad(decision.balance, [gate.weight, gate.noise], allow_unused=True)
    want = torch.autograd.grad(loss, [twin.weight, twin.noise], allow_unused=True)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-9)


def test_bias_evens_a_skewed_load() -> None:
    moe = MoE(8, experts=4, k=1, gate="bias", rate=0.02, seed=0)
    gate: Any = moe.gate
    x = random(256, 8)
    x[:, 0] = 1  # a constant feature, by which the gate prefers expert 0
    with torch.no_grad():
        gate.weight[0, 0] = 2
    moe(x)
    first = moe.stats()
    weight = gate.weight.clone()
    for _ in range(60):
        moe(x).square().sum().backward()
    assert first.imbalance > 3
    assert moe.stats().imbalance < 1.2
    assert torch.equal(gate.weight, weight)
    assert gate.bias[0] < 0 < gate.bias[1:].max()
    check(moe.eval(), "bias", x)


def test_bias_moves_once_a_backward_in_training() -> None:
    moe = MoE(3, experts=3, k=1, gate="bias", rate=0.25, score="softmax", seed=0)
    gate: Any = moe.gate
    with torch.no_grad():
        gate.weight.zero_()  # all go to expert 0
    x = random(6, 3)
    out = moe(x)
    with torch.no_grad():
        moe(x)
    moe.eval()
    moe(x).sum().backward()
    assert gate.bias.tolist() == [0, 0, 0]
    out.sum().backward()
    assert gate.bias.tolist() == [-0.25, 0.25, 0.25]


def test_a_deferred_bias_moves_by_the_sum_of_the_loads() -> None:
    moe = MoE(3, experts=3, k=1, gate="bias", rate=0.25, score="softmax", seed=0)
    gate = moe.gate
    assert isinstance(gate, Bias)
    gate.deferred = True
    with torch.no_grad():
        gate.weight.copy_(torch.eye(3))
    for expert, tokens in ((0, 4), (1, 3), (2, 1), (1, 1)):  # 4, 4 and 1; alone 1 would rise
        moe(F.one_hot(torch.full((tokens,), expert), 3).float()).sum().backward()
    assert gate.bias.tolist() == [0, 0, 0]
    gate.step()
    assert gate.bias.tolist() == [-0.25, -0.25, 0.25]
    gate.step()
    assert gate.bias.tolist() == [-0.25, -0.25, 0.25]


def test_bias_stays_in_float32_and_is_saved() -> None:
    moe = MoE(4, gate="bias", seed=0)
    gate: Any = moe.gate
    gate.bias += 0.501  # 0.5 in bfloat16
    moe = moe.bfloat16()
    assert gate.weight.dtype == torch.bfloat16
    assert gate.bias.dtype == torch.float32
    assert gate.bias[0].item() == pytest.approx(0.501)
    other = MoE(4, gate="bias", seed=1)
    other.load_state_dict(moe.state_dict())
    assert torch.equal(other.gate.get_buffer("bias"), gate.bias)


# --- the layer ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", GATES)
def test_state_dict_round_trip(name: str) -> None:
    moe, other = (
        MoE(6, gate=name, shared_experts=1, activation="swiglu", seed=seed).eval()
        for seed in (1, 2)
    )
    x = random(20, 6)
    assert not torch.equal(moe(x), other(x))
    other.load_state_dict(moe.state_dict())
    assert torch.equal(moe(x), other(x))


def test_stats() -> None:
    moe = MoE(2, experts=2, hidden=2, k=1, capacity_factor=0.75, gate="switch", jitter=0.0)
    assert (moe.stats().imbalance, moe.stats().entropy, moe.stats().dropped) == (1, 0, 0)
    with torch.no_grad():
        moe.gate.weight.copy_(torch.tensor([[0.0, 0.0], [1.0, 0.0]]))
    x = torch.tensor([[1.0, 0.0]] * 3 + [[-2.0, 0.0]])
    moe(x)
    stats = moe.stats()
    probability = (x @ moe.gate.weight.T).softmax(1).mean(0).tolist()
    assert stats.load.tolist() == [1, 3]
    assert stats.load.dtype == torch.int64
    assert stats.dropped == 0.25  # 2 of 3 fit into ceil(0.75 * 4 / 2)
    assert stats.imbalance == 1.5
    assert stats.entropy == pytest.approx(-sum(p * math.log(p) for p in probability))


def test_shared_modules_see_every_token() -> None:
    moe = MoE(3, experts=2, expert=lambda: nn.Linear(3, 3), shared_experts=2, seed=0)
    x = random(9, 3)
    assert moe.shared is not None
    everyone = sum(module(x) for module in moe.shared)
    out = moe(x)
    moe.shared_experts = 0
    torch.testing.assert_close(out, moe(x) + everyone)


def test_a_gate_of_ones_own() -> None:
    moe = MoE(4, experts=6, gate=TopK(4, 6, k=3, score="sigmoid"))
    assert moe.k == 3
    moe.eval()
    check(moe, "topk", random(12, 4))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gate": "best"}, "gate: expected a Gate or one of topk, .*bias, got best"),
        ({"gate": "switch", "k": 2}, "Switch: k: expected 1, got 2"),
        ({"gate": "switch", "jitter": 1.0}, "Switch: jitter: expected 0 or more .*got 1.0"),
        ({"gate": "gshard", "k": 1}, "GShard: k: expected 2, got 1"),
        ({"gate": "prototype", "k": 3}, r"experts: expected a multiple of 3 \(k\), got 8"),
        ({"gate": "bias", "rate": -1.0}, "Bias: rate: expected at least 0, got -1.0"),
        ({"score": "relu"}, "TopK: score: expected softmax or sigmoid, got relu"),
        ({"gate": "expert_choice", "capacity_factor": 1.0}, "capacity_factor: expected None"),
        ({"gate": TopK(4, 3)}, "expected one of dim=4, experts=8, got dim=4, experts=3, k=2"),
        ({"gate": TopK(4, 8), "k": 1}, "expected one of dim=4, experts=8, k=1, got"),
        ({"activation": "tanh"}, "activation: expected one of gelu, relu, silu, swiglu, got tanh"),
        ({"activation": "relu", "expert": nn.Identity}, "activation: expected gelu, its default"),
        ({"shared_experts": -1}, "shared_experts: expected at least 0"),
        ({"z_weight": -1.0}, "z_weight: expected at least 0"),
    ],
)
def test_refuses_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        MoE(**({"dim": 4} | arguments))


def test_refuses_options_that_the_gate_does_not_have() -> None:
    with pytest.raises(TypeError, match="jitter"):
        MoE(4, gate="gshard", jitter=0.1)
    with pytest.raises(TypeError, match="jitter: expected no options beside a Gate"):
        MoE(4, gate=TopK(4, 8), jitter=0.1)
    with pytest.raises(NotImplementedError, match="Gate: expected a decide method"):
        Gate(4, 8)(random(2, 4), 0.0)
