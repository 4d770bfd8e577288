"""A model whose experts are out of memory gives the bits of the one that has them."""

import copy
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

from heterps import MoE, offload, pack_experts
from workers.offload.engine import _reads
from workers.offload.experts.layout import ExpertFileError, LayerAt, TensorAt, placed
from workers.offload.experts.packed import PackedExperts
from workers.offload.slots.cache import Cache
from workers.offload.slots.policy import POLICIES
from workers.offload.slots.ring import Ring, plan_ring


class Expert(nn.Module):
    """Of modules; with a weight that is used twice, and a buffer."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.one = nn.Linear(dim, dim)
        self.two = nn.Linear(dim, dim)
        self.two.weight = self.one.weight
        self.register_buffer("scale", torch.rand(dim))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(torch.relu(self.one(x))) * self.scale
        return out


class Model(nn.Module):
    def __init__(self, dim: int, hidden: int, experts: int, k: int) -> None:
        super().__init__()
        torch.manual_seed(dim * 100 + hidden)
        self.dense = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(
            [
                MoE(dim, experts, hidden, k, activation="swiglu", shared_experts=1),
                MoE(dim, experts + 1, hidden, k, capacity_factor=1.0),
                MoE(dim, experts, k=k, expert=lambda: Expert(dim)),
            ]
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        for block in self.blocks:
            x = x + block(x)
        return x


@settings(max_examples=25)
@given(
    dim=st.integers(1, 3).map(lambda n: 16 * n),
    hidden=st.integers(1, 4).map(lambda n: 16 * n),
    experts=st.integers(2, 9),
    k=st.integers(1, 2),
    slots=st.integers(2, 30),
    mode=st.sampled_from(["cache", "ring"]),
    policy=st.sampled_from(sorted(POLICIES)),
    readers=st.integers(1, 4),
    threads=st.integers(1, 2),
    direct=st.booleans(),
    backend=st.sampled_from(["", "loop"]),
    batches=st.lists(st.integers(0, 40), min_size=1, max_size=6),
)
@pytest.mark.filterwarnings("ignore:offload")
def test_bits_are_those_of_the_resident_model(
    tmp_path_factory: pytest.TempPathFactory,
    dim: int,
    hidden: int,
    experts: int,
    k: int,
    slots: int,
    mode: str,
    policy: str,
    readers: int,
    threads: int,
    direct: bool,
    backend: str,
    batches: list[int],
) -> None:
    path = tmp_path_factory.mktemp("offload") / "experts"
    resident = Model(dim, hidden, experts, k).eval()
    model = copy.deepcopy(resident)
    extent = max(layer.extent for layer in pack_experts(model, path))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with (
            pytest.MonkeyPatch.context() as patch,
            offload(
                model,
                slots * extent,
                path=path,
                mode=mode,
                policy=policy,
                readers=readers,
                direct=direct,
            ) as handle,
            torch.no_grad(),
        ):
            patch.setenv("HETERPS_GROUPED_FFN", backend)
            if mode == "cache":
                assert handle.slots + handle.ahead == min(slots, handle.experts)
            needed = 0
            for i, tokens in enumerate(batches):
                x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(i))
                assert torch.equal(model(x), resident(x))
                for layer in resident.blocks:
                    assert isinstance(layer, MoE)
                    limit = 0 if tokens == 0 else 1
                    needed += int((layer.load.clamp(max=limit)).sum())
            assert handle.stats.hits + handle.stats.misses == needed
            assert handle.stats.tokens == sum(batches)
            if slots >= handle.experts:  # each is read once
                assert handle.stats.misses <= handle.experts
    finally:
        torch.set_num_threads(before)


class Slow(PackedExperts):
    """A disk that takes its time, longest for the expert that was asked for first."""

    def native_read(self, layer: int, first: int, *given: Any) -> _reads.Transfer:
        def wait(extent: int, _: int) -> None:
            time.sleep(0.002 * (5 - (first + extent) % 5))

        return super().native_read(layer, first, *given, wait)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_what_is_given_stays_until_the_next_is_asked_for(tmp_path: Path, policy: str) -> None:
    """On a slow disk, with fewer slots than a forward needs experts."""
    layer = MoE(16, 12, 16, seed=1)
    pack_experts(layer, tmp_path / "experts")
    for slots in (1, 2, 5, 12):
        cache = Cache(Slow(tmp_path / "experts"), slots, POLICIES[policy](), readers=3)
        generator = torch.Generator().manual_seed(slots)
        with cache:
            for _ in range(6):
                wanted = sorted(torch.randperm(12, generator=generator)[:7].tolist())
                got = []
                for ready in cache.arrivals(0, wanted):
                    time.sleep(0.001)
                    for e, place in ready.places.items():
                        w1 = cache.packed.layers[0].tensors[0].of(ready.memory[place])
                        assert torch.equal(w1, layer.w1[e])
                        got.append(e)
                assert sorted(got) == wanted


@pytest.mark.parametrize("memory", [2, 3, 4, 7, 12])
def test_a_ring_gives_what_the_disk_has_however_slow_and_in_any_order(
    tmp_path: Path, memory: int
) -> None:
    layers = nn.ModuleList([MoE(16, n, 16, seed=n) for n in (5, 3, 6)])
    packed = pack_experts(layers, tmp_path / "experts")
    plan = plan_ring(packed, memory * packed[0].extent)
    draw = torch.Generator().manual_seed(memory)
    with Ring(Slow(tmp_path / "experts"), plan, readers=3) as ring:
        calls = [0, 1, 2, 0, 1, 2, 2, 0, 1, 1, 2, 0, 1, 2]
        for layer in calls:
            count = packed[layer].experts
            wanted = sorted(torch.randperm(count, generator=draw)[: count - 1].tolist())
            got = []
            for ready in ring.arrivals(layer, wanted):
                time.sleep(0.001)
                for e, place in ready.places.items():
                    w1 = packed[layer].tensors[0].of(ready.memory[place])
                    assert torch.equal(w1, layers[layer].w1[e])
                    got.append(e)
            assert got == wanted
        assert memory >= 14 or ring.strays > 0


@given(
    counts=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 9)), min_size=1, max_size=6),
    memory=st.integers(2, 200),
)
def test_a_rings_sections_are_all_experts_once_and_fit(
    counts: list[tuple[int, int]], memory: int
) -> None:
    layers = placed(
        LayerAt(str(i), n, "", (TensorAt("w", torch.float32, (pages, 1024)),))
        for i, (n, pages) in enumerate(counts)
    )
    size = memory * max(layer.extent for layer in layers)
    plan = plan_ring(layers, size)
    assert [(s.layer, e) for s in plan.sections for e in range(s.first, s.last)] == [
        (i, e) for i, layer in enumerate(layers) for e in range(layer.experts)
    ]
    assert plan.memory <= size
    if sum(layer.experts * layer.extent for layer in layers) <= size:
        assert all(plan.stays)
        assert plan.slots == 0
    else:
        assert 2 <= plan.slots < plan.stays.count(False)
        assert plan.memory > size - plan.size


@pytest.mark.parametrize("mode", ["cache", "ring"])
@pytest.mark.filterwarnings("ignore:offload")
def test_a_read_that_fails_is_told_and_can_be_repeated(tmp_path: Path, mode: str) -> None:
    path = tmp_path / "experts"
    resident = MoE(16, 8, 16, k=8, seed=1).eval()
    model = copy.deepcopy(resident)
    [layer] = pack_experts(resident, path)
    whole = path.read_bytes()
    x = torch.randn(3, 16)
    memory = 3 * layer.extent  # fewer than are needed
    with offload(model, memory, path=path, direct=False, mode=mode), torch.no_grad():
        at = layer.at(5) + 100
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(bytes([whole[at] ^ 1]))
        for _ in range(3):
            with pytest.raises(ExpertFileError, match=r"layer '': expert 5: expected checksum"):
                model(x)
        with path.open("r+b") as stream:
            stream.seek(at)
            stream.write(whole[at : at + 1])
        assert torch.equal(model(x), resident(x))
    with torch.no_grad(), pytest.raises(RuntimeError, match="was closed"):
        model(x)


@pytest.mark.filterwarnings("ignore:offload")
def test_what_would_be_wrong_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    model = Model(16, 16, 4, 2)
    state = copy.deepcopy(model.state_dict())
    pack_experts(model, path)
    other = copy.deepcopy(model)
    with torch.no_grad():
        dict(other.named_parameters())["blocks.1.w2"][3, 0, 0] += 1
    with pytest.raises(ExpertFileError, match=r"layer 'blocks.1': expert 3.*other weights"):
        offload(other, "1MB", path=path)
    with pytest.raises(ExpertFileError, match="no such file"):
        offload(Model(16, 16, 4, 2).to("meta"), "1MB", path=tmp_path / "none")
    with pytest.raises(ValueError, match="memory: expected at least"):
        offload(model, 100, path=path)
    with pytest.raises(ValueError, match="memory: expected bytes"):
        offload(model, "much", path=path)
    with pytest.raises(ValueError, match="policy: expected"):
        offload(model, "1MB", path=path, policy="fifo")
    with pytest.raises(ValueError, match="mode: expected"):
        offload(model, "1MB", path=path, mode="best")
    with pytest.raises(ValueError, match="two of the largest experts, for mode ring"):
        offload(model, 5000, path=path, mode="ring")
    with offload(model, "1MB", path=path):
        with pytest.raises(RuntimeError, match="state_dict"):
            model.state_dict()
        with pytest.raises(RuntimeError, match="load_state_dict"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match="inference"):
            model(torch.randn(2, 16, requires_grad=True))
        with pytest.raises(ValueError, match="out of memory already"):
            offload(model, "1MB", path=path)


class Dense(nn.Module):
    """Takes its time, and fails or is broken off when told to."""

    error: BaseException | None = None

    def __init__(self, passes: Callable[[float], None]) -> None:
        super().__init__()
        self._passes = passes

    def forward(self, x: Tensor) -> Tensor:
        self._passes(1.0)
        if self.error is not None:
            raise self.error
        return x


def test_what_a_caller_does_between_forwards_is_not_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]

    def passes(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("workers.offload.slots.store.perf_counter", lambda: now[0])
    model = nn.Sequential(Dense(passes), MoE(16, 4, 16), Dense(passes), MoE(16, 4, 16))
    dense = model[2]
    assert isinstance(dense, Dense)
    x = torch.randn(3, 16)
    with offload(model.eval(), "1MB", path=tmp_path / "experts") as handle, torch.no_grad():
        for _ in range(3):
            model(x)
            passes(1000.0)
        assert handle.stats.seconds == 6.0
        model[1](x)  # a layer by itself
        passes(1000.0)
        assert handle.stats.seconds == 6.0
        for error in (ValueError(), KeyboardInterrupt()):
            dense.error = error
            with pytest.raises(type(error)):
                model(x)
            passes(1000.0)
        assert handle.stats.seconds == 8.0  # of the one that was broken off nothing is known
        dense.error = None
        model(x)
        assert handle.stats.seconds == 10.0
        assert handle.stats.disk_busy <= handle.stats.seconds


def test_memory_below_one_tokens_cycle_is_warned_of(tmp_path: Path) -> None:
    model = Model(16, 16, 4, 2)
    extent = max(layer.extent for layer in pack_experts(model, tmp_path / "experts"))
    with (
        pytest.warns(UserWarning, match="memory holds 5 experts, and one token uses 6"),
        offload(model, 5 * extent, path=tmp_path / "experts", mode="cache"),
    ):
        pass


def test_experts_on_meta_are_those_of_the_file(tmp_path: Path) -> None:
    resident = Model(16, 16, 4, 2).eval()
    del resident.blocks[2]
    pack_experts(resident, tmp_path / "experts")
    with torch.device("meta"):
        model = Model(16, 16, 4, 2).eval()
        del model.blocks[2]
    experts = {f"blocks.{i}.{w}" for i in (0, 1) for w in ("w1", "w2")}
    dense = {key: one for key, one in resident.state_dict().items() if key not in experts}
    model.load_state_dict(dense, strict=False, assign=True)
    x = torch.randn(9, 16)
    with offload(model, "1MB", path=tmp_path / "experts"), torch.no_grad():
        assert torch.equal(model(x), resident(x))


_MEASURE = """
import sys
from pathlib import Path
import torch
from heterps import MoE, offload

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

small = MoE(256, 2, 256, seed=1).eval()
with torch.no_grad(), offload(small, "2MB", path=sys.argv[1] + ".small", mode="cache"):
    small(torch.randn(64, 256))
with torch.device("meta"):
    model = MoE(256, 128, 256).eval()
model.gate.weight = torch.nn.Parameter(torch.randn(128, 256))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
direct = sys.argv[2] == "direct"
with torch.no_grad(), offload(model, "16MiB", path=sys.argv[1], mode="cache", direct=direct) as h:
    for _ in range(5):
        model(torch.randn(64, 256))
    assert h.slots + h.ahead == 32 and h.stats.misses > 100, h.stats
print(peak() - before)
"""


@pytest.mark.parametrize("way", ["direct", pytest.param("buffered", marks=pytest.mark.exhaustive)])
def test_memory_stays_within_what_was_given(tmp_path: Path, way: str) -> None:
    pack_experts(MoE(256, 128, 256), tmp_path / "experts")  # 64 MiB
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "experts"), way]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) <= (16 << 20) + (8 << 20)  # activations, and threads' own
