"""Training with experts and their states out of memory gives the weights of training with them."""

import copy
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from heterps import MoE, aux_loss, offload, offload_training
from workers.offload.engine import _reads
from workers.offload.experts.layout import ExpertFileError
from workers.offload.experts.packed import PackedExperts
from workers.offload.experts.trained import TrainedExperts
from workers.offload.slots.policy import POLICIES
from workers.offload.training.training import Training


class Model(nn.Module):
    """Two mixtures with something dense around them; the second one is not always called."""

    def __init__(self, dim: int, hidden: int, experts: int, k: int, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(dim * 100 + hidden)
        self.dense = nn.Linear(dim, dim)
        self.first = MoE(dim, experts, hidden, k, activation="swiglu", shared_experts=1)
        self.second = MoE(dim, experts + 1, hidden, 1, capacity_factor=1.0)
        self.to(dtype)

    def forward(self, x: Tensor, second: bool = True) -> Tensor:
        x = self.first(x) + self.dense(x)
        return x + self.second(x) if second else x


OPTIMIZERS: dict[str, Callable[[Any], Optimizer]] = {
    "sgd": lambda p: SGD(p, 0.1),
    "decay": lambda p: SGD(p, 0.1, weight_decay=0.01),
    "momentum": lambda p: SGD(p, 0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": lambda p: SGD(p, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: Adam(p, 0.01),
    "amsgrad": lambda p: Adam(p, 0.01, betas=(0.5, 0.9), amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: AdamW(p, 0.01),
}


def step(model: Model, optimizer: Optimizer, seed: int, tokens: int, second: bool) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    dtype = model.dense.weight.dtype
    x = torch.randn(tokens, model.dense.in_features, generator=draw).to(dtype)
    out = model(x, second)
    loss = out.square().mean() if tokens else out.sum()
    loss = loss + (aux_loss(model) if second else model.first.aux_loss)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def require_equal(path: Path, handle: Training, model: nn.Module, resident: nn.Module) -> None:
    theirs = dict(resident.named_parameters())
    for name, one in model.named_parameters():
        assert torch.equal(one, theirs[name]), name
    handle.save(path)
    with PackedExperts(path) as packed:
        for layer in packed.layers:
            for e in range(layer.experts):
                for name, one in packed.expert(layer.name, e).items():
                    assert torch.equal(one, theirs[f"{layer.name}.{name}"][e]), (
                        layer.name,
                        e,
                        name,
                    )


def extent_of(model: nn.Module, kind: str) -> int:
    """Bytes of the largest expert with its states, and of what updates it."""
    largest = max(
        layer.w1[0].nbytes + layer.w2[0].nbytes
        for layer in model.modules()
        if isinstance(layer, MoE)
    )
    states = {"adam": 3, "adamw": 3, "amsgrad": 4, "momentum": 2, "nesterov": 2}.get(kind, 1)
    return -(-(states * largest + 64 * 9 + 8) // 4096) * 4096


@settings(max_examples=30)
@given(
    dim=st.integers(1, 40),
    hidden=st.integers(1, 40),
    experts=st.integers(2, 7),
    k=st.integers(1, 2),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    slots=st.integers(1, 16),
    kind=st.sampled_from(sorted(OPTIMIZERS)),
    policy=st.sampled_from(sorted(POLICIES)),
    readers=st.integers(1, 4),
    threads=st.integers(1, 2),
    direct=st.booleans(),
    period=st.integers(0, 2),
    steps=st.lists(
        st.tuples(st.integers(0, 30), st.booleans(), st.booleans()), min_size=1, max_size=7
    ),
)
def test_weights_are_those_of_training_in_memory(
    tmp_path_factory: pytest.TempPathFactory,
    dim: int,
    hidden: int,
    experts: int,
    k: int,
    dtype: torch.dtype,
    slots: int,
    kind: str,
    policy: str,
    readers: int,
    threads: int,
    direct: bool,
    period: int,
    steps: list[tuple[int, bool, bool]],
) -> None:
    """Also with rates that change, forwards without gradients between, and going on later."""
    folder = tmp_path_factory.mktemp("training")
    resident = Model(dim, hidden, experts, k, dtype)
    model = copy.deepcopy(resident)
    theirs, ours = (OPTIMIZERS[kind](one.parameters()) for one in (resident, model))
    largest = max(x.w1[0].nbytes + x.w2[0].nbytes for x in (model.first, model.second))
    memory = slots * extent_of(model, kind) + 3 * largest
    options: dict[str, Any] = {"policy": policy, "readers": readers, "direct": direct}
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        path = folder / "experts"
        handle = offload_training(model, ours, memory, path=path, period=period, **options)
        assert handle.slots >= 1
        for i, (tokens, second, anew) in enumerate(steps):
            for optimizer in (theirs, ours):
                optimizer.param_groups[0]["lr"] *= 0.9
            losses = [
                step(one, opt, i, tokens, second)
                for one, opt in ((resident, theirs), (model, ours))
            ]
            assert torch.equal(*losses)
            x = torch.randn(3, dim, generator=torch.Generator().manual_seed(i)).to(dtype)
            with torch.no_grad():
                assert torch.equal(model(x), resident(x))
            if anew:  # what is dense is kept by its user
                handle.close()
                for layer in (model.first, model.second):
                    layer.outside = None
                fresh = Model(dim, hidden, experts, k, dtype)
                state = dict(model.named_parameters())
                mine = dict(fresh.named_parameters())
                for layer in (fresh.first, fresh.second):
                    for name in ("w1", "w2"):
                        meta = getattr(layer, name).detach().to("meta")
                        setattr(layer, name, nn.Parameter(meta))
                with torch.no_grad():
                    for key, one in state.items():
                        mine[key].copy_(one)
                model, old = fresh, ours
                ours = OPTIMIZERS[kind](model.parameters())
                for group, was in zip(ours.param_groups, old.param_groups, strict=True):
                    group["lr"] = was["lr"]
                names = dict(model.named_parameters())
                for key, one in state.items():
                    if one in old.state:
                        ours.state[names[key]] = old.state[one]
                handle = offload_training(model, ours, memory, path=path, **options)
        require_equal(folder / "saved", handle, model, resident)
        handle.close()
    finally:
        torch.set_num_threads(before)


def trained(path: Path, kind: str = "adam", **options: Any) -> tuple[Model, Optimizer, Training]:
    model = Model(16, 16, 4, 2, torch.float32)
    optimizer = OPTIMIZERS[kind](model.parameters())
    return model, optimizer, offload_training(model, optimizer, "1MB", path=path, **options)


def test_what_was_saved_runs_and_goes_on(tmp_path: Path) -> None:
    model, optimizer, handle = trained(tmp_path / "experts")
    with handle:
        for i in range(3):
            step(model, optimizer, i, 9, True)
        handle.save(tmp_path / "plain")
        handle.save(tmp_path / "states", states=True)
        assert handle.steps == 3
        assert handle.bytes_written == 0  # all have room
        handle.flush()
        assert handle.bytes_written > 0
        x = torch.randn(5, 16)
        with torch.no_grad():
            expected = model(x)
    fresh = Model(16, 16, 4, 2, torch.float32)
    state = dict(model.named_parameters())
    for layer in (fresh.first, fresh.second):
        for name in ("w1", "w2"):
            setattr(layer, name, nn.Parameter(getattr(layer, name).detach().to("meta")))
    fresh.load_state_dict(state, strict=False)
    again = copy.deepcopy(fresh)
    with offload(fresh, "1MB", path=tmp_path / "plain"), torch.no_grad():
        assert torch.equal(fresh(x), expected)
    optimizer = Adam(again.parameters())
    with offload_training(again, optimizer, "1MB", path=tmp_path / "states") as other:
        assert other.steps == 3
        with torch.no_grad():
            assert torch.equal(again(x), expected)


def test_a_file_that_was_not_closed_is_refused(tmp_path: Path) -> None:
    model, optimizer, handle = trained(tmp_path / "experts")
    step(model, optimizer, 0, 9, True)
    handle.flush()
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(tmp_path / "experts")
    with PackedExperts(tmp_path / "experts") as packed, pytest.raises(ExpertFileError):
        packed.expert("first", 0)
    handle.close()
    TrainedExperts(tmp_path / "experts").close()
    with pytest.raises(ExpertFileError, match="broken off"):  # nobody finished that one
        TrainedExperts(tmp_path / "experts")


def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    model = Model(16, 16, 4, 2, torch.float32)
    with pytest.raises(ValueError, match="expected one of torch's SGD, Adam, AdamW, got RMSprop"):
        offload_training(model, torch.optim.RMSprop(model.parameters()), "1MB", path=path)
    with pytest.raises(ValueError, match="w1 and w2 of first in one of its groups"):
        offload_training(model, Adam(model.dense.parameters()), "1MB", path=path)
    with pytest.raises(ValueError, match="memory: expected at least"):
        offload_training(model, Adam(model.parameters()), 4096, path=path)
    half = Model(16, 16, 4, 2, torch.bfloat16)
    with pytest.raises(ValueError, match=r"float32 or float64, .* got torch\.bfloat16"):
        offload_training(half, Adam(half.parameters()), "1MB", path=path)
    used = Adam(model.parameters())
    step(model, used, 0, 9, True)
    with pytest.raises(ValueError, match="made no step"):
        offload_training(model, used, "1MB", path=path)
    other = MoE(16, 4, k=2, expert=lambda: nn.Linear(16, 16))
    with pytest.raises(ValueError, match="got modules"):
        offload_training(other, Adam(other.parameters()), "1MB", path=path)
    tied = Model(16, 16, 4, 2, torch.float32)
    tied.third = MoE(16, 5, 16, 1)
    tied.third.w1 = tied.second.w1
    with pytest.raises(ValueError, match="got shared ones"):
        offload_training(tied, Adam(tied.parameters()), "1MB", path=path)
    frozen = Model(16, 16, 4, 2, torch.float32)
    frozen.first.w1.requires_grad_(False)
    with pytest.raises(ValueError, match="first: expected w1 and w2 to require gradients"):
        offload_training(frozen, Adam(frozen.parameters()), "1MB", path=path)
    assert not path.exists()
    model, optimizer, handle = trained(path)
    with handle:
        loss = model(torch.randn(9, 16)).sum()
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="one backward in each"):
            loss.backward()
        with pytest.raises(RuntimeError, match=r"expected optimizer.step\(\)"):
            model(torch.randn(9, 16))
        optimizer.step()
        model(torch.randn(9, 16))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("HETERPS_GROUPED_FFN", "loop")
            with pytest.raises(RuntimeError, match="expected native kernels"):
                model(torch.randn(9, 16))
    fresh = Model(16, 16, 4, 2, torch.float32)
    with pytest.raises(ExpertFileError, match="values and no such file"):
        offload_training(fresh, Adam(fresh.parameters()), "1MB", path=path)


def test_a_write_that_was_torn_is_found_when_it_is_read(tmp_path: Path) -> None:
    """In the same session; a later one does not open the file at all."""
    model = Model(16, 16, 6, 1, torch.float32)
    optimizer = Adam(model.parameters())
    memory = 2 * extent_of(model, "adam") + 3 * (16 * 16 * 3 * 4)
    path = tmp_path / "experts"
    handle = offload_training(model, optimizer, memory, path=path, direct=False)
    step(model, optimizer, 0, 30, True)
    packed = handle._store.packed
    at = packed.layers[0].at(1)
    with path.open("r+b") as stream:
        stream.seek(at + 100)
        old = stream.read(1)
        stream.seek(at + 100)
        stream.write(bytes([old[0] ^ 1]))
    with pytest.raises(ExpertFileError, match="layer 'first': expert 1: expected checksum"):
        handle.save(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
    with pytest.raises(RuntimeError, match="broken off"), torch.no_grad():
        model(torch.randn(9, 16))
    handle.close()
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(path)


def test_a_disk_that_fails_breaks_the_training_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Model(16, 16, 6, 1, torch.float32)
    optimizer = Adam(model.parameters())
    memory = 2 * extent_of(model, "adam") + 3 * (16 * 16 * 3 * 4)
    handle = offload_training(model, optimizer, memory, path=tmp_path / "experts")

    def full(_: Any, __: int, ___: int, extent: memoryview) -> _reads.Transfer:
        return _reads.Transfer(device, False, True, 0, [extent], [None], None)

    with Path("/dev/full").open("wb") as stream:
        device = stream.fileno()
        monkeypatch.setattr(TrainedExperts, "native_write", full)
        with pytest.raises(OSError, match="No space left"):
            step(model, optimizer, 0, 30, True)
        with pytest.raises(RuntimeError, match="broken off"), torch.no_grad():
            model(torch.randn(9, 16))
        with pytest.raises(RuntimeError, match="broken off"):
            handle.save(tmp_path / "saved")
        handle.close()
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(tmp_path / "experts")


def test_a_step_by_other_options_than_its_backward_is_told(tmp_path: Path) -> None:
    model, optimizer, handle = trained(tmp_path / "experts")
    with handle:
        model(torch.randn(9, 16)).sum().backward()
        optimizer.param_groups[0]["lr"] = 1.0
        with pytest.raises(RuntimeError, match="options to stay as they are"):
            optimizer.step()
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(tmp_path / "experts")


def test_a_step_that_is_broken_off_is_not_taken_for_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it is one that is made up for, in a forward."""
    model, optimizer, handle = trained(tmp_path / "experts", "momentum")
    with handle:
        for i in range(2):
            step(model, optimizer, i, 1, True)  # two of four experts

        def interrupt(*_: Any) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(SGD, "step", interrupt)
        with pytest.raises(KeyboardInterrupt), torch.no_grad():
            model(torch.randn(40, 16))
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(tmp_path / "experts")


def test_options_of_many_steps_are_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workers.offload.training.training._MOST_STEPS", 3)
    model, optimizer, handle = trained(tmp_path / "experts", "momentum")
    resident = Model(16, 16, 4, 2, torch.float32)
    theirs = OPTIMIZERS["momentum"](resident.parameters())
    with handle:
        for i in range(8):
            for one, other in ((model, optimizer), (resident, theirs)):
                other.param_groups[0]["lr"] = 0.1 / (i + 1)
                step(one, other, i, 1, i % 2 == 0)
            assert all(len(course.options) < 3 for course in handle._courses)
        require_equal(tmp_path / "saved", handle, model, resident)
        assert handle.steps == 8


_TRAIN = """
import sys, torch
from heterps import MoE, offload_training
model = MoE(64, 16, 64, seed=1)
optimizer = torch.optim.Adam(model.parameters())
handle = offload_training(model, optimizer, 6 * 24 * 4096 , path=sys.argv[1], period=1)
print("begun", flush=True)
for i in range(100000):
    optimizer.zero_grad()
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(i))
    model(x).square().mean().backward()
    optimizer.step()
    if i == 2:
        handle.save(sys.argv[1] + ".saved", states=True)
        print("saved", flush=True)
"""


@pytest.mark.parametrize("after_s", [0.0, 0.05, pytest.param(0.3, marks=pytest.mark.exhaustive)])
def test_a_kill_in_a_write_back_is_found_and_what_was_saved_is_whole(
    tmp_path: Path, after_s: float
) -> None:
    path = tmp_path / "experts"
    command = [sys.executable, "-c", _TRAIN, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "begun\n"
        assert process.stdout.readline() == "saved\n"
        time.sleep(after_s)
        os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(path)
    model = MoE(64, 16, 64, seed=1)
    optimizer = Adam(model.parameters())
    resident, theirs = copy.deepcopy(model), None
    theirs = Adam(resident.parameters())
    for i in range(3):
        theirs.zero_grad()
        x = torch.randn(40, 64, generator=torch.Generator().manual_seed(i))
        resident(x).square().mean().backward()
        theirs.step()
    for name in ("w1", "w2"):
        setattr(model, name, nn.Parameter(getattr(model, name).detach().to("meta")))
    optimizer = Adam(model.parameters())
    with offload_training(model, optimizer, "1MB", path=f"{path}.saved") as handle:
        assert handle.steps == 3
        handle.save(tmp_path / "plain")
    with PackedExperts(tmp_path / "plain") as packed:
        for e in range(16):
            assert torch.equal(packed.expert("", e)["w1"], resident.w1[e])


_MEASURE = """
import sys
from pathlib import Path
import torch
from heterps import MoE, offload_training

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

def train(path, experts, memory, steps):
    model = MoE(256, experts, 256)
    gate = model.gate
    optimizer = torch.optim.Adam(model.parameters())
    with offload_training(model, optimizer, memory, path=path) as handle:
        Path("/proc/self/clear_refs").write_text("5")
        before = peak() - handle.slots * 384 * 4096
        for _ in range(steps):
            model(torch.randn(64, 256)).square().mean().backward()
            optimizer.step()
        return handle, peak() - before

train(sys.argv[1] + ".small", 2, "8MB", 2)
handle, more = train(sys.argv[1], 64, "24MiB", 3)
assert handle.bytes_written > 48 << 20 and handle.stats.misses > 100, handle.stats
print(more)
"""


def test_memory_holds_experts_states_and_what_updates_them(tmp_path: Path) -> None:
    """96 MiB of them in 24; before is when slots are there already, and what made the file.

    The allocator gives back what is freed: how much of it it keeps for later is another's choice.
    """
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "experts")]
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120, env=env)
    assert int(done.stdout) <= (24 << 20) + (8 << 20)  # activations, and threads' own
