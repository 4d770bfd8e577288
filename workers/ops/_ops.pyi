"""Types of the native module built from `cuda/`; all arrays contiguous, outputs written in place."""

from torch import Tensor

cuda_capability: int
products_sm90: bool

def group_workspace(pairs: int, experts: int) -> int: ...
def route(
    logits: Tensor,
    k: int,
    chosen: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    workspace: Tensor | None = None,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def group(
    chosen: Tensor,
    experts: int,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    workspace: Tensor | None = None,
    stream: int = 0,
) -> None: ...
def weigh(logits: Tensor, chosen: Tensor, weights: Tensor, threads: int = 1) -> None: ...
def weigh_backward(
    weights: Tensor, grad: Tensor, chosen: Tensor, gradient: Tensor, threads: int = 1
) -> None: ...
def gather_rows(
    x: Tensor,
    weights: Tensor | None,
    order: Tensor,
    k: int,
    rows: Tensor,
    stream: int = 0,
    threads: int = 1,
    inverse: Tensor | None = None,
) -> None: ...
def gather_sum(
    rows: Tensor, weights: Tensor | None, inverse: Tensor, k: int, x: Tensor, stream: int = 0, threads: int = 1
) -> None: ...
def gather_dot(
    x: Tensor, rows: Tensor, inverse: Tensor, k: int, weights: Tensor, stream: int = 0, threads: int = 1
) -> None: ...
def grouped_ffn(
    rows: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: int,
    out: Tensor,
    pre: Tensor | None,
    act: Tensor | None,
    stream: int = 0,
    threads: int = 1,
    workspace: Tensor | None = None,
) -> None: ...
def routed_ffn(
    x: Tensor,
    weights: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: int,
    out: Tensor,
    rows: Tensor,
    pre: Tensor | None,
    threads: int = 1,
) -> None: ...
def routed_ffn_backward(
    grad: Tensor,
    x: Tensor,
    weights: Tensor,
    order: Tensor,
    inverse: Tensor,
    offsets: Tensor,
    rows: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: int,
    grad_rows: Tensor | None,
    grad_x: Tensor | None,
    grad_weights: Tensor | None,
    grad_w1: Tensor | None,
    grad_w2: Tensor | None,
    threads: int = 1,
) -> None: ...
def linear_forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    y: Tensor,
    relu: bool = False,
    threads: int = 1,
) -> None: ...
def linear_grad_input(
    grad: Tensor,
    weight: Tensor,
    grad_x: Tensor,
    add: bool = False,
    rectified: Tensor | None = None,
    threads: int = 1,
) -> None: ...
def linear_grad_weight(
    grad: Tensor, x: Tensor, grad_weight: Tensor, threads: int = 1
) -> None: ...
def grouped_ffn_at(
    rows: Tensor,
    offsets: Tensor,
    places: Tensor,
    memory: Tensor,
    w1: int,
    w2: int,
    hidden: int,
    activation: int,
    out: Tensor,
    threads: int = 1,
) -> None: ...
def grouped_ffn_workspace(rows: Tensor, w1: Tensor, w2: Tensor, activation: int) -> int: ...
def grouped_ffn_backward(
    grad: Tensor,
    rows: Tensor,
    offsets: Tensor,
    pre: Tensor,
    w1: Tensor,
    w2: Tensor,
    activation: int,
    act: Tensor | None,
    grad_pre: Tensor | None,
    grad_rows: Tensor | None,
    grad_w1: Tensor | None,
    grad_w2: Tensor | None,
    stream: int = 0,
    threads: int = 1,
    workspace: Tensor | None = None,
) -> None: ...
def embedding_pool(
    table: Tensor,
    ids: Tensor,
    offsets: Tensor,
    scale: Tensor | None,
    out: Tensor,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def embedding_segments(
    grad: Tensor,
    sorted: Tensor,
    source: Tensor,
    bag: Tensor,
    scale: Tensor | None,
    table_rows: int,
    rows: Tensor,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def embedding_update(
    grad: Tensor,
    sorted: Tensor,
    source: Tensor,
    bag: Tensor,
    scale: Tensor | None,
    rule: int,
    rate: float,
    epsilon: float,
    table: Tensor,
    state: Tensor | None,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def quantize_rows(
    x: Tensor, q: Tensor, scale: Tensor, stream: int = 0, threads: int = 1
) -> None: ...
def dequantize_rows(
    q: Tensor, scale: Tensor, x: Tensor, stream: int = 0, threads: int = 1
) -> None: ...
def row_cache_find(
    cache_keys: Tensor,
    used: Tensor,
    score: Tensor,
    ways: int,
    lfu: bool,
    tick: int,
    keys: Tensor,
    slots: Tensor,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def row_cache_admit(
    cache_keys: Tensor,
    used: Tensor,
    score: Tensor,
    ways: int,
    lfu: bool,
    tick: int,
    keys: Tensor,
    order: Tensor,
    slots: Tensor,
    left: Tensor,
    evicted: Tensor,
    stream: int = 0,
    threads: int = 1,
) -> None: ...
def row_cache_set(keys: Tensor, sets: int, out: Tensor) -> None: ...
