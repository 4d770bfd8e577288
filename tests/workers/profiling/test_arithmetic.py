"""What a forward computes is counted by hand, of operations too that torch has no formula for."""

import pytest
import torch
from torch import nn

from heterps import MoE
from protos.decision_pb2 import LinearRoute
from workers.ops.linear import Routes, available
from workers.ops.routed_linear import route
from workers.profiling.arithmetic import _cudnn_rnn, forward_flops

TOKENS, DIM, EXPERTS, HIDDEN = 96, 32, 8, 48


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(("k", "activation"), [(1, "relu"), (2, "gelu"), (3, "swiglu")])
def test_a_mixture_of_experts(k: int, activation: str, dtype: torch.dtype) -> None:
    layer = MoE(DIM, EXPERTS, HIDDEN, k, activation=activation).to(dtype)
    inner = 2 * HIDDEN if activation == "swiglu" else HIDDEN
    expert = DIM * inner + HIDDEN * DIM
    expected = 2 * TOKENS * (DIM * EXPERTS + k * expert)
    assert forward_flops(layer, [torch.randn(TOKENS, DIM, dtype=dtype)]) == expected


def test_experts_that_are_modules() -> None:
    def expert() -> nn.Module:
        return nn.Sequential(nn.Linear(DIM, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, DIM))

    layer = MoE(DIM, EXPERTS, k=2, expert=expert)
    expected = 2 * TOKENS * (DIM * EXPERTS + 2 * 2 * DIM * HIDDEN)
    assert forward_flops(layer, [torch.randn(TOKENS, DIM)]) == expected


@pytest.mark.parametrize("way", available())
def test_a_linear_layer_by_any_route(way: str) -> None:
    layer = nn.Linear(DIM, HIDDEN)
    ways = dict.fromkeys(("forward", "grad_input", "grad_weight"), way)
    route(layer, Routes([LinearRoute(rows=TOKENS, inputs=DIM, outputs=HIDDEN, **ways)]))
    assert forward_flops(layer, [torch.randn(TOKENS, DIM)]) == 2 * TOKENS * DIM * HIDDEN


@pytest.mark.parametrize(("kind", "gates"), [(nn.LSTM, 4), (nn.GRU, 3), (nn.RNN, 1)])
@pytest.mark.parametrize(("layers", "both"), [(1, False), (2, True)])
def test_layers_that_go_through_sequences(
    kind: type[nn.RNNBase], gates: int, layers: int, both: bool
) -> None:
    made = kind(DIM, HIDDEN, layers, bidirectional=both, batch_first=True)
    ways = 2 if both else 1
    widths = [DIM, *[ways * HIDDEN] * (layers - 1)]
    step = sum(ways * gates * HIDDEN * (width + HIDDEN) for width in widths)
    assert forward_flops(made, [torch.randn(4, 7, DIM)]) == 2 * 4 * 7 * step
    shapes = [tuple(weight.shape) for weight in made.parameters()]
    assert _cudnn_rnn((7, 4, DIM), shapes) == 2 * 4 * 7 * step


def test_products_of_vectors_and_of_three() -> None:
    class Score(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(DIM))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    x, y = torch.randn(TOKENS, DIM), torch.randn(TOKENS, HIDDEN)
    assert forward_flops(Score(), [x]) == 2 * TOKENS * DIM
    assert forward_flops(nn.Bilinear(DIM, HIDDEN, 5), [x, y]) == 2 * TOKENS * DIM * HIDDEN * 5


class Inner(nn.Module):
    """Takes a step of gradient descent in its forward, of weights and of what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, HIDDEN, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            loss = self.layer(x).square().mean()
            of_x, step = torch.autograd.grad(loss, [x, self.layer.weight], create_graph=True)
        return (x - of_x) @ (self.layer.weight - step).t()


def test_a_forward_that_differentiates() -> None:
    assert forward_flops(Inner(), [torch.randn(TOKENS, DIM)]) == 4 * 2 * TOKENS * DIM * HIDDEN
