"""What else a training loop of torch does, with experts out of memory as with them in it."""

import copy
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, Optimizer
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

from heterps import offload_training
from tests.workers.offload.training.test_training import Model, require_equal, step
from workers.offload.experts.layout import ExpertFileError
from workers.offload.experts.trained import TrainedExperts
from workers.offload.training import backward
from workers.offload.training.training import Training


def both(k: int = 2) -> tuple[Model, Model]:
    resident = Model(16, 16, 4, k, torch.float32)
    return resident, copy.deepcopy(resident)


def drawn(seed: int, tokens: int) -> Tensor:
    return torch.randn(tokens, 16, generator=torch.Generator().manual_seed(seed))


def test_a_rate_that_is_a_tensor_is_that_of_each_step(tmp_path: Path) -> None:
    """A schedule changes it in place; experts without tokens make their steps later."""
    resident, model = both()
    theirs, ours = (Adam(one.parameters(), torch.tensor(0.01)) for one in (resident, model))
    schedules = [ExponentialLR(one, 0.5) for one in (theirs, ours)]
    with offload_training(model, ours, "1MB", path=tmp_path / "experts") as handle:
        for i in range(6):
            for one, optimizer in ((resident, theirs), (model, ours)):
                step(one, optimizer, i, 1, True)
            for schedule in schedules:
                schedule.step()
        require_equal(tmp_path / "saved", handle, model, resident)


def test_the_state_of_an_optimizer_is_loaded_and_its_rates_change(tmp_path: Path) -> None:
    """Its groups are others from then on."""
    resident, model = both()
    theirs: Optimizer = Adam(resident.parameters(), 0.01)
    ours: Optimizer = Adam(model.parameters(), 0.01)
    with offload_training(model, ours, "1MB", path=tmp_path / "experts") as handle:
        for i in range(6):
            if i == 2:
                ours.load_state_dict(copy.deepcopy(ours.state_dict()))
            for one, optimizer in ((resident, theirs), (model, ours)):
                optimizer.param_groups[0]["lr"] *= 0.5
                step(one, optimizer, i, 2, True)
        require_equal(tmp_path / "saved", handle, model, resident)


def test_a_fused_optimizer_is_refused(tmp_path: Path) -> None:
    """Experts one by one would not get the bits that they get stacked."""
    model, _ = both()
    with pytest.raises(ValueError, match="expected Adam without fused=True"):
        offload_training(
            model, Adam(model.parameters(), fused=True), "1MB", path=tmp_path / "experts"
        )


def test_gradients_of_an_input_alone_update_no_expert(tmp_path: Path) -> None:
    resident, model = both()
    theirs, ours = (SGD(one.parameters(), 0.1) for one in (resident, model))
    with offload_training(model, ours, "1MB", path=tmp_path / "experts") as handle:
        for i in range(2):
            found = []
            for one in (resident, model):
                x = drawn(i, 9).requires_grad_()
                found += torch.autograd.grad(one(x).square().sum(), x)
            assert torch.equal(*found)
            for one, optimizer in ((resident, theirs), (model, ours)):
                step(one, optimizer, i, 9, True)
        require_equal(tmp_path / "saved", handle, model, resident)


def test_a_backward_that_is_interrupted_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some experts have been updated by then, and others have not."""
    _, model = both()
    optimizer = SGD(model.parameters(), 0.1)
    handle = offload_training(model, optimizer, "1MB", path=tmp_path / "experts")
    real, calls = backward._ffn_backward, []

    def interrupted(*args: Any) -> Any:
        calls.append(args)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    monkeypatch.setattr(backward, "_ffn_backward", interrupted)
    with handle:
        with pytest.raises(KeyboardInterrupt):
            model(drawn(0, 40)).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="broken off"):
            model(drawn(0, 40))
        with pytest.raises(RuntimeError, match="broken off"):
            handle.save(tmp_path / "saved")
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(tmp_path / "experts")


def test_activations_that_are_computed_again_are_those_of_their_experts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who is in memory comes first, which may be another one each time."""
    resident, model = both(k=4)  # as many tokens for each expert: shapes tell nothing
    theirs, ours = (SGD(one.parameters(), 0.1) for one in (resident, model))
    real, calls = Training.arrive, []

    def turned(
        self: Training, layer: int, experts: Sequence[int]
    ) -> Generator[tuple[int, dict[str, Tensor]], None, None]:
        calls.append(layer)
        for expert in list(experts)[:: 1 if calls.count(layer) % 2 else -1]:
            yield from real(self, layer, [expert])

    def again(one: nn.Module, optimizer: Optimizer) -> None:
        optimizer.zero_grad()
        checkpoint(one, drawn(0, 9), use_reentrant=False).square().mean().backward()
        optimizer.step()

    monkeypatch.setattr(Training, "arrive", turned)
    with offload_training(model, ours, "1MB", path=tmp_path / "experts") as handle:
        for one, optimizer in ((resident, theirs), (model, ours)):
            again(one, optimizer)
        require_equal(tmp_path / "saved", handle, model, resident)


def test_autocast_rounds_as_it_does_in_memory(tmp_path: Path) -> None:
    resident, model = both()
    theirs, ours = (Adam(one.parameters(), 0.01) for one in (resident, model))
    with offload_training(model, ours, "1MB", path=tmp_path / "experts") as handle:
        for i in range(3):
            for one, optimizer in ((resident, theirs), (model, ours)):
                optimizer.zero_grad()
                with torch.autocast("cpu", torch.bfloat16):
                    loss = one(drawn(i, 9)).float().square().mean()
                loss.backward()
                optimizer.step()
        require_equal(tmp_path / "saved", handle, model, resident)
