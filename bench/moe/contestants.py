"""The contestants of bench.moe: ways to run one mixture-of-experts layer.

All compute out = sum over choices of weight * (silu(x gate) * (x up)) down, weights being the
softmax over the chosen logits, or each prototype's own softmax.
"""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from workers import ops

T = TypeVar("T")


class AbsentError(Exception):
    """This contestant does not run here; the message says why."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What all are given. `w1` [E, H, 2I] has the gate before the value, `w2` is [E, I, H]."""

    batches: list[Tensor]
    direction: Tensor
    router: Tensor
    bias: Tensor
    w1: Tensor
    w2: Tensor
    k: int
    prototypes: bool


class Run(ABC):
    """A layer with its own copy of the weights."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.batches = [x.clone().requires_grad_() for x in problem.batches]
        self.router = problem.router.clone().requires_grad_()
        self.direction = problem.direction
        self.weights = self.make_weights()

    def make_weights(self) -> list[Tensor]:
        return [self.problem.w1.clone().requires_grad_(), self.problem.w2.clone().requires_grad_()]

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x.float(), self.router) + self.problem.bias

    def choose(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(weights [T, k], experts [T, k]) by torch's own operators."""
        logits = self.logits(x)
        if self.problem.prototypes:
            groups = logits.reshape(len(x), self.problem.k, -1)
            best, index = groups.softmax(dim=2).max(dim=2)
            first = torch.arange(self.problem.k, device=x.device) * groups.shape[2]
            return best, index + first
        best, chosen = logits.topk(self.problem.k, dim=1)
        return best.softmax(dim=1), chosen

    @abstractmethod
    def layer(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""

    def forward(self, batch: int) -> None:
        with torch.no_grad():
            self.layer(self.batches[batch])

    def gradients(self, batch: int) -> tuple[Tensor, list[Tensor]]:
        x = self.batches[batch]
        out = self.layer(x)
        inputs = [x, self.router, *self.weights]
        grads = torch.autograd.grad(
            out, inputs, self.direction, allow_unused=True, materialize_grads=True
        )
        return out, list(grads)

    def both(self, batch: int) -> None:
        self.gradients(batch)

    def check(self, batch: int) -> list[Tensor]:
        """Output and gradients of x, router, w1, w2."""
        out, (x, router, *weights) = self.gradients(batch)
        return [out, x, router, *self.stacked(weights)]

    def stacked(self, grads: list[Tensor]) -> list[Tensor]:
        return grads


class HeterPS(Run):
    """topk_ffn; of prototypes router_logits, group, routed_ffn."""

    def logits(self, x: Tensor) -> Tensor:
        return ops.router_logits(x, self.router) + self.problem.bias

    def layer(self, x: Tensor) -> Tensor:
        k = self.problem.k
        if not self.problem.prototypes:
            bias = self.problem.bias
            return ops.topk_ffn(x, self.router, k, *self.weights, "swiglu", bias)[0]
        logits = self.logits(x)
        groups = logits.reshape(len(x) * k, -1)
        best = ops.route(groups.detach(), 1).chosen
        first = torch.arange(k, device=x.device, dtype=torch.int32) * groups.shape[1]
        routing = ops.group(best.reshape(-1, k) + first, logits.shape[1])
        weights = groups.softmax(dim=1).gather(1, best.long()).reshape(-1, k)
        return ops.routed_ffn(x, routing, weights, *self.weights, "swiglu")


class Native(HeterPS):
    """The same by its own kernels where it would choose torch's grouped_mm."""

    def __init__(self, problem: Problem) -> None:
        if not problem.w1.is_cuda:
            raise AbsentError("what heterps chooses on a CPU")
        super().__init__(problem)

    def forward(self, batch: int) -> None:
        with _native_products():
            super().forward(batch)

    def gradients(self, batch: int) -> tuple[Tensor, list[Tensor]]:
        with _native_products():
            return super().gradients(batch)


@contextmanager
def _native_products() -> Iterator[None]:
    before = os.environ.get("HETERPS_GROUPED_FFN")
    os.environ["HETERPS_GROUPED_FFN"] = "native"
    try:
        yield
    finally:
        del os.environ["HETERPS_GROUPED_FFN"]
        if before is not None:
            os.environ["HETERPS_GROUPED_FFN"] = before


class Loop(Run):
    """An nn.Linear for each matrix of each expert, and a loop, as models are commonly written."""

    def make_weights(self) -> list[Tensor]:
        self.linears = []
        for w1, w2 in zip(self.problem.w1, self.problem.w2, strict=True):
            gate, up = w1.chunk(2, dim=1)
            self.linears.append([w.t().contiguous().requires_grad_() for w in (gate, up, w2)])
        return [weight for expert in self.linears for weight in expert]

    def layer(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x)
        out = torch.zeros_like(x)
        for e, (gate, up, down) in enumerate(self.linears):
            token, choice = torch.where(chosen == e)
            if len(token) == 0:
                continue
            rows = x[token]
            rows = F.linear(F.silu(F.linear(rows, gate)) * F.linear(rows, up), down)
            rows = rows * weights[token, choice, None]
            out.index_add_(0, token, rows.to(out.dtype))
        return out

    def stacked(self, grads: list[Tensor]) -> list[Tensor]:
        w1 = [torch.cat([g.t(), u.t()], 1) for g, u in zip(grads[::3], grads[1::3], strict=True)]
        return [torch.stack(w1), torch.stack([grad.t() for grad in grads[2::3]])]


class Exact(Loop):
    """The loop in float64."""

    def __init__(self, problem: Problem) -> None:
        wide = [t.double() for t in (problem.direction, problem.router, problem.bias)]
        weights = [problem.w1.double(), problem.w2.double()]
        batches = [x.double() for x in problem.batches]
        super().__init__(Problem(batches, *wide, *weights, problem.k, problem.prototypes))

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(x, self.router) + self.problem.bias


class GroupedMM(Run):
    """sort, histogram, torch's grouped_mm, scale, sum over choices: as Transformers does it."""

    def __init__(self, problem: Problem) -> None:
        found = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
        if found is None:
            raise AbsentError(f"torch {torch.__version__} has no grouped_mm")
        self.product: Any = found
        super().__init__(problem)

    def layer(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x)
        k, experts = self.problem.k, len(self.problem.w1)
        flat = chosen.flatten()
        order = flat.argsort()
        inverse = order.argsort()
        counts = torch.histc(flat.float()[order], bins=experts, min=0, max=experts - 1)
        ends = counts.cumsum(0).int()
        rows = x[order // k]
        gate, up = self.product(rows, self.weights[0], offs=ends).chunk(2, dim=1)
        rows = self.product(F.silu(gate) * up, self.weights[1], offs=ends)
        rows = rows * weights.flatten()[order, None].to(rows.dtype)
        return rows[inverse].reshape(-1, k, x.shape[1]).sum(dim=1)


class Liger(Run):
    """Liger-Kernel's fused MoE, in Triton."""

    def __init__(self, problem: Problem) -> None:
        if not problem.w1.is_cuda:
            raise AbsentError("Triton kernels, for GPUs alone")
        # Otherwise it compiles and tries 168 kernels for each width: minutes a shape.
        os.environ.setdefault("LIGER_FUSED_MOE_AUTOTUNE", "0")
        try:
            from liger_kernel.ops import LigerFusedMoEFunction
        except ImportError as error:
            raise AbsentError(f"liger-kernel: {error}") from error
        self.function = LigerFusedMoEFunction
        super().__init__(problem)

    def make_weights(self) -> list[Tensor]:
        weights = (self.problem.w1, self.problem.w2)
        return [w.transpose(1, 2).contiguous().requires_grad_() for w in weights]

    def layer(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x)
        out: Tensor = self.function.apply(x, *self.weights, chosen.int(), weights.to(x.dtype))
        return out

    def stacked(self, grads: list[Tensor]) -> list[Tensor]:
        return [grad.transpose(1, 2) for grad in grads]


class _Stacked(torch.autograd.Function):
    """FBGEMM's product of each expert's rows, x [R, K] and w [E, N, K] -> [R, N]; its gradient.

    The ops do not differentiate by themselves. `grouped_grad` takes the weights transposed in
    strides alone; `grouped_wgrad` leaves what experts without rows get to chance.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, sizes: Tensor) -> Tensor:
        ctx.save_for_backward(x, w, sizes)
        out: Tensor = torch.ops.fbgemm.bf16bf16bf16_grouped_stacked(x, w, sizes)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w, sizes = ctx.saved_tensors
        grad, ops_ = grads[0].contiguous(), torch.ops.fbgemm
        grad_x = ops_.bf16bf16bf16_grouped_grad(grad, w.permute(0, 2, 1), sizes)
        grad_w = ops_.bf16bf16bf16_grouped_wgrad(grad, x, sizes)
        return grad_x, grad_w.masked_fill((sizes == 0)[:, None, None], 0), None


class FbgemmGenAI(Run):
    """FBGEMM GenAI's grouped products, in CUTLASS; the rest by torch's own operators."""

    OPS = tuple(f"bf16bf16bf16_grouped_{name}" for name in ("stacked", "grad", "wgrad"))

    def __init__(self, problem: Problem) -> None:
        self.require(problem)
        super().__init__(problem)

    def require(self, problem: Problem) -> None:
        if not problem.w1.is_cuda or problem.w1.dtype != torch.bfloat16:
            raise AbsentError("bfloat16 on GPUs alone")
        if torch.cuda.get_device_capability(problem.w1.device) < (9, 0):
            raise AbsentError("its kernels are for Hopper and later")
        try:
            import fbgemm_gpu.experimental.gen_ai  # noqa: F401
        except (ImportError, OSError) as error:  # made for another torch or CUDA
            raise AbsentError(f"fbgemm-gpu-genai: {error}") from error
        missing = [name for name in self.OPS if not hasattr(torch.ops.fbgemm, name)]
        if missing:
            raise AbsentError(f"this fbgemm-gpu-genai has no {', '.join(missing)}")

    def make_weights(self) -> list[Tensor]:
        weights = (self.problem.w1, self.problem.w2)
        return [w.transpose(1, 2).contiguous().requires_grad_() for w in weights]

    def layer(self, x: Tensor) -> Tensor:
        weights, chosen = self.choose(x)
        k, experts = self.problem.k, len(self.problem.w1)
        flat = chosen.flatten()
        order = flat.argsort()
        inverse = order.argsort()
        # Not bincount, which waits for the GPU.
        sizes = torch.zeros(experts, dtype=torch.int64, device=x.device)
        sizes.scatter_add_(0, flat, torch.ones_like(flat))
        product: Any = _Stacked.apply
        gate, up = product(x[order // k], self.weights[0], sizes).chunk(2, dim=1)
        rows = product(F.silu(gate) * up, self.weights[1], sizes)
        rows = rows * weights.flatten()[order, None].to(rows.dtype)
        return rows[inverse].reshape(-1, k, x.shape[1]).sum(dim=1)

    def stacked(self, grads: list[Tensor]) -> list[Tensor]:
        return [grad.transpose(1, 2) for grad in grads]


class Captured(Run):
    """Another contestant whose passes are CUDA graphs: what its launches cost the host is left out.

    One for each batch, since a graph reads where it was captured; all in the same memory.
    """

    def __init__(self, problem: Problem, inner: type[Run]) -> None:
        if not problem.w1.is_cuda:
            raise AbsentError("graphs are for GPUs alone")
        self.inner = inner(problem)
        self.pool = torch.cuda.graph_pool_handle()
        self.all: list[torch.cuda.CUDAGraph] = []  # with the last of its graphs a pool goes
        self.graphs: dict[tuple[bool, int], torch.cuda.CUDAGraph] = {}

    def layer(self, x: Tensor) -> Tensor:
        return self.inner.layer(x)

    def captured(self, work: Callable[[int], T], batch: int) -> tuple[torch.cuda.CUDAGraph, T]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):
            work(batch)
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool):
            result = work(batch)
        self.all.append(graph)
        return graph, result

    def replay(self, backward: bool, batch: int) -> None:
        if (backward, batch) not in self.graphs:
            work = self.inner.both if backward else self.inner.forward
            self.graphs[backward, batch], _ = self.captured(work, batch)
        self.graphs[backward, batch].replay()

    def forward(self, batch: int) -> None:
        self.replay(False, batch)

    def both(self, batch: int) -> None:
        self.replay(True, batch)

    def gradients(self, batch: int) -> tuple[Tensor, list[Tensor]]:
        graph, (out, grads) = self.captured(self.inner.gradients, batch)
        graph.replay()
        return out.clone(), [grad.clone() for grad in grads]

    def stacked(self, grads: list[Tensor]) -> list[Tensor]:
        return self.inner.stacked(grads)


class Bound(Run):
    """The bound: plain bmm of the same size, rows split evenly; no router, nothing moved."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem)
        experts = len(problem.w1)
        rows = -(-len(problem.batches[0]) * problem.k // experts)
        x, self.w1, self.w2 = problem.batches[0], problem.w1, problem.w2
        self.rows = x[torch.arange(experts * rows, device=x.device) % len(x)]
        self.rows = self.rows.reshape(experts, rows, -1).contiguous()
        self.act = torch.bmm(self.rows, self.w1)[..., : self.w2.shape[1]].contiguous()
        self.pre_grad = torch.bmm(self.rows, self.w1)

    def layer(self, x: Tensor) -> Tensor:
        return x

    def forward(self, batch: int) -> None:
        torch.bmm(self.rows, self.w1)
        torch.bmm(self.act, self.w2)

    def both(self, batch: int) -> None:
        self.forward(batch)
        torch.bmm(self.rows, self.w2.transpose(1, 2))
        torch.bmm(self.act.transpose(1, 2), self.rows)
        torch.bmm(self.pre_grad, self.w1.transpose(1, 2))
        torch.bmm(self.rows.transpose(1, 2), self.pre_grad)


ALL: dict[str, Callable[[Problem], Run]] = {
    "heterps": HeterPS,
    "heterps graph": partial(Captured, inner=HeterPS),
    "heterps native": Native,
    "loop": Loop,
    "grouped_mm": GroupedMM,
    "grouped_mm graph": partial(Captured, inner=GroupedMM),
    "liger": Liger,
    "fbgemm": FbgemmGenAI,
    "bmm bound": Bound,
}
