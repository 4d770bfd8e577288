"""What cannot be trained out of memory is refused by name, with the remedy."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from heterps import MoE
from protos.job_pb2 import JobSpec
from workers.model.code.entry import ModelError
from workers.offload.training.suited import check_suited, rooms_of
from workers.stage.experts.offloading import take_all_out
from workers.stage.experts.outside import outside_of


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = MoE(8, 4, 8), MoE(8, 12, 8)


def job(memory: str = "1MB") -> JobSpec:
    found = JobSpec()
    found.train.optimizer.name = "adam"
    found.train.offload.memory = memory
    return found


def modules(model: Model) -> None:
    model.second = MoE(8, 2, expert=lambda: nn.Linear(8, 8))


def frozen(model: Model) -> None:
    model.second.w2.requires_grad_(False)


def half(model: Model) -> None:
    model.second.half()


def shared(model: Model) -> None:
    model.second = MoE(8, 4, 8)
    model.second.w1 = model.first.w1


def hooked(model: Model) -> None:
    model.second.w1.register_hook(lambda gradient: gradient)


def parametrized(model: Model) -> None:
    nn.utils.parametrizations.weight_norm(model.second, "w1")


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (modules, "second: expected stacked experts, got modules"),
        (frozen, "second: expected w2 to be trained, got requires_grad=False"),
        (half, "second: expected experts of float32 or float64, got torch.float16"),
        (shared, "first: expected w1 of its own, got one that another module has too"),
        (hooked, "second: expected w1 without hooks"),
        (parametrized, "second: expected plain w1 and w2, got parametrizations"),
    ],
)
def test_layers_are_refused(change: Callable[[Model], None], expected: str) -> None:
    model = Model()
    check_suited(job(), model, ["first", "second"])
    change(model)
    with pytest.raises(ModelError, match=expected) as caught:
        check_suited(job(), model, ["first", "second"])
    assert "leave train.offload out" in str(caught.value)
    check_suited(JobSpec(), model, ["first", "second"])


def test_a_layer_that_is_called_twice_is_refused() -> None:
    with pytest.raises(ModelError, match="second: expected one call of it in a forward"):
        check_suited(job(), Model(), ["first", "second", "second#2"])
    outer = nn.Sequential(Model(), nn.Linear(8, 8))
    with pytest.raises(ModelError, match=r"0\.first: expected one call"):
        check_suited(job(), outer, ["0", "1", "0#2"])
    check_suited(job(), outer, ["0", "1", "1#2"])


def test_a_model_without_experts_is_refused() -> None:
    with pytest.raises(ModelError, match=r"Linear has no heterps\.MoE layer"):
        check_suited(job(), nn.Linear(8, 8), ["0"])


def test_memory_is_shared_by_what_layers_have() -> None:
    model = Model()
    assert rooms_of(job("160000"), model) == {"first": 40_000, "second": 120_000}
    expected = r"train\.offload\.memory: first's share: expected at least \d+ bytes"
    with pytest.raises(ModelError, match=expected) as raised:
        check_suited(job("8000"), model, ["first", "second"])
    enough = re.search(r"all have enough of (\d+) in all", str(raised.value))
    assert enough is not None
    check_suited(job(enough[1]), model, ["first", "second"])
    with pytest.raises(ModelError, match="share: expected at least"):
        check_suited(job(str(int(enough[1]) - 1)), model, ["first", "second"])


def test_kernels_that_are_turned_off_are_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERPS_GROUPED_FFN", "loop")
    with pytest.raises(ModelError, match="expected native kernels"):
        check_suited(job(), Model(), ["first", "second"])


def test_a_second_call_within_a_layer_is_found_in_training(tmp_path: Path) -> None:
    model, spec = MoE(8, 4, 8), job()
    spec.train.optimizer.learning_rate = 0.1
    take_all_out(spec, model, tmp_path)
    outside = outside_of(model)
    assert outside is not None
    twice = model(model(torch.randn(5, 8))).sum()
    with outside, pytest.raises(RuntimeError, match="expected one call of it in a forward"):
        twice.backward()
