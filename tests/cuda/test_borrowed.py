"""What the bindings take for arrays, and that they look at tensors without an export."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from workers import ops
from workers.ops import _ops

BORROWS = hasattr(Tensor, "__dlpack_c_exchange_api__")  # from torch 2.10 on


def rows_of(x: Any, order: Any, out: Any) -> Any:
    _ops.gather_rows(x, None, order, 1, out)
    return out


def test_arrays_of_any_framework_and_tensors_of_any_class() -> None:
    x, order = np.arange(6, dtype=np.float32).reshape(3, 2), np.array([2, 0])
    expected = x[order]
    tensor, index = torch.from_numpy(x), torch.from_numpy(order)
    for source in (x, tensor, torch.nn.Parameter(tensor.clone()).detach()):
        for places in (order, index):
            assert (rows_of(source, places, np.empty((2, 2), np.float32)) == expected).all()
            assert (rows_of(source, places, torch.empty(2, 2)).numpy() == expected).all()
    assert rows_of(tensor[:0], index[:0], torch.empty(0, 2)).shape == (0, 2)
    behind = torch.cat([torch.zeros(1, 2), tensor])[1:]  # begins inside its storage
    assert (rows_of(behind, index, torch.empty(2, 2)).numpy() == expected).all()


@pytest.mark.skipif(not BORROWS, reason="a torch whose tensors are exported")
def test_tensors_are_not_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    def export(*_: Any, **__: Any) -> None:
        raise AssertionError("exported")

    monkeypatch.setattr(Tensor, "__dlpack__", export)
    monkeypatch.setattr(Tensor, "__dlpack_device__", export)
    routing = ops.route(torch.randn(5, 4), 2)
    x, w1, w2 = (torch.randn(*s).requires_grad_() for s in ((5, 8), (4, 8, 8), (4, 8, 8)))
    out = ops.gather_sum(
        ops.grouped_ffn(ops.gather_rows(x, routing), routing.offsets, w1, w2), routing
    )
    out.sum().backward()
    assert x.grad is not None


def test_what_is_no_array_is_refused() -> None:
    x, order = torch.zeros(3, 2), torch.tensor([2, 0])
    frozen = np.empty((2, 2), np.float32)
    frozen.flags.writeable = False
    for wrong in ((None, order, x), (x, [2, 0], x), (x, order, 3), (x, order, frozen)):
        with pytest.raises(TypeError, match="incompatible function arguments"):
            rows_of(*wrong)
    with pytest.raises(ValueError, match="x: expected a contiguous array"):
        rows_of(torch.zeros(2, 3).t(), order, torch.empty(2, 2))
    for wrong in ((x.to("meta"), order, x), (x, order.int(), torch.empty(2, 2))):
        with pytest.raises((ValueError, TypeError)):
            rows_of(*wrong)
