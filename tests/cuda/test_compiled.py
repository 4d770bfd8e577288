"""Every op is traced by torch.compile without a break, and captured as a CUDA graph.

That kernels may be captured is seen on an emulated GPU too (`emulate/driver/check.h::enqueued`).
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from workers import ops
from workers.ops import dequantize_rows, embedding_pool, embedding_update, quantize_rows


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    torch._dynamo.reset()
    return torch.compile(function, backend="aot_eager", fullgraph=True)


def same(mine: Any, theirs: Any) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a.to_dense() if a.is_sparse else a, b.to_dense() if b.is_sparse else b)


def layer(x: Tensor, router: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    """A mixture of experts of the ops alone."""
    logits = (x @ router).float()
    routing = ops.route(logits.detach(), 2)
    weights = ops.choice_weights(logits, routing.chosen)
    rows = ops.grouped_ffn(ops.gather_rows(x, routing), routing.offsets, w1, w2, "swiglu")
    return ops.gather_sum(rows, routing, weights)


def test_a_whole_layer(device: str) -> None:
    torch.manual_seed(0)
    inputs = [torch.randn(*s) for s in ((9, 8), (8, 4), (4, 8, 12), (4, 6, 8))]
    inputs = [tensor.to(device).requires_grad_() for tensor in inputs]
    mine, theirs = compiled(layer)(*inputs), layer(*inputs)
    same([mine], [theirs])
    same(torch.autograd.grad(mine.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs))


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_embeddings(device: str, mode: str) -> None:
    table = torch.randn(7, 4, device=device, requires_grad=True)
    ids = torch.tensor([0, 3, 3, 6], device=device)
    offsets = torch.tensor([0, 1, 1, 4], device=device)
    weights = torch.rand(4, device=device, requires_grad=True)

    def pooled(table: Tensor, weights: Tensor) -> Tensor:
        return embedding_pool(table, ids, offsets, weights, mode)

    mine, theirs = compiled(pooled)(table, weights), pooled(table, weights)
    same([mine], [theirs])
    inputs = (table, weights)
    same(torch.autograd.grad(mine.sum(), inputs), torch.autograd.grad(theirs.sum(), inputs))


def test_a_step_on_rows(device: str) -> None:
    ids = torch.tensor([0, 3, 3], device=device)
    offsets = torch.tensor([0, 2, 3], device=device)
    grad = torch.randn(2, 4, device=device)

    def step(table: Tensor, state: Tensor) -> None:
        embedding_update(table, state, grad, ids, offsets, rule="adagrad", rate=0.1, epsilon=1e-8)

    mine = [torch.ones(5, 4, device=device), torch.zeros(5, 4, device=device)]
    theirs = [tensor.clone() for tensor in mine]
    compiled(step)(*mine)
    step(*theirs)
    same(mine, theirs)


def test_rows_of_eight_bits(device: str) -> None:
    def there_and_back(x: Tensor) -> Tensor:
        return dequantize_rows(*quantize_rows(x))

    x = torch.randn(5, 9, device=device)
    same([compiled(there_and_back)(x)], [there_and_back(x)])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU, or a torch without CUDA")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_is_a_graph_where_there_are_as_many_tokens(dtype: torch.dtype) -> None:
    sizes = ((64, 16), (16, 4), (4, 16, 32), (4, 16, 16))
    inputs = [torch.randn(*size).to("cuda", dtype).requires_grad_() for size in sizes]

    def step() -> list[Tensor]:
        out = layer(*inputs)
        return [out, *torch.autograd.grad(out.sum(), inputs)]

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):  # which route otherwise
        with torch.no_grad():
            for tensor in inputs:
                tensor.copy_(torch.randn_like(tensor))
        graph.replay()
        same(captured, step())
