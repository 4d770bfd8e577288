"""A model whose experts are out of memory gives the bits of the one that has them."""

import copy
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from heterps import MoE, offload, pack_experts
from workers.offload.cache import Cache
from workers.offload.layout import ExpertFileError
from workers.offload.packed import PackedExperts
from workers.offload.policy import POLICIES


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


@settings(deadline=None, max_examples=25)
@given(
    dim=st.integers(1, 3).map(lambda n: 16 * n),
    hidden=st.integers(1, 4).map(lambda n: 16 * n),
    experts=st.integers(2, 9),
    k=st.integers(1, 2),
    slots=st.integers(1, 30),
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
                model, slots * extent, path=path, policy=policy, readers=readers, direct=direct
            ) as handle,
            torch.no_grad(),
        ):
            patch.setenv("HETERPS_GROUPED_FFN", backend)
            assert handle.slots == min(slots, handle.experts)
            needed = 0
            for i, tokens in enumerate(batches):
                x = torch.randn(tokens, dim, generator=torch.Generator().manual_seed(i))
                assert torch.equal(model(x), resident(x))
                for layer in resident.blocks:
                    assert isinstance(layer, MoE)
                    limit = 0 if tokens == 0 else 1
                    needed += int((layer.load.clamp(max=limit)).sum())
            assert handle.stats.hits + handle.stats.misses == needed
            if slots >= handle.experts:  # each is read once
                assert handle.stats.misses <= handle.experts
    finally:
        torch.set_num_threads(before)


class Slow(PackedExperts):
    """A disk that takes its time, longest for the expert that was asked for first."""

    def read(self, layer: int, expert: int, into: Tensor) -> None:
        time.sleep(0.002 * (5 - expert % 5))
        super().read(layer, expert, into)


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
                for extents in cache.arrivals(0, wanted):
                    time.sleep(0.001)
                    for e, extent in extents.items():
                        w1 = cache.packed.layers[0].tensors[0].of(extent)
                        assert torch.equal(w1, layer.w1[e])
                        got.append(e)
                assert sorted(got) == wanted


def test_a_read_that_fails_is_told_and_can_be_repeated(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    resident = MoE(16, 8, 16, k=8, seed=1).eval()
    model = copy.deepcopy(resident)
    [layer] = pack_experts(resident, path)
    whole = path.read_bytes()
    x = torch.randn(3, 16)
    with offload(model, "1MB", path=path, direct=False), torch.no_grad():
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
    with offload(model, "1MB", path=path):
        with pytest.raises(RuntimeError, match="state_dict"):
            model.state_dict()
        with pytest.raises(RuntimeError, match="load_state_dict"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match="inference"):
            model(torch.randn(2, 16, requires_grad=True))
        with pytest.raises(ValueError, match="out of memory already"):
            offload(model, "1MB", path=path)


def test_memory_below_one_tokens_cycle_is_warned_of(tmp_path: Path) -> None:
    model = Model(16, 16, 4, 2)
    extent = max(layer.extent for layer in pack_experts(model, tmp_path / "experts"))
    with (
        pytest.warns(UserWarning, match="memory holds 5 experts, and one token uses 6"),
        offload(model, 5 * extent, path=tmp_path / "experts"),
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
with torch.no_grad(), offload(small, "2MB", path=sys.argv[1] + ".small"):
    small(torch.randn(64, 256))
with torch.device("meta"):
    model = MoE(256, 128, 256).eval()
model.gate.weight = torch.nn.Parameter(torch.randn(128, 256))
Path("/proc/self/clear_refs").write_text("5")
before = peak()
direct = sys.argv[2] == "direct"
with torch.no_grad(), offload(model, "16MiB", path=sys.argv[1], direct=direct) as h:
    for _ in range(5):
        model(torch.randn(64, 256))
    assert h.slots == 32 and h.stats.misses > 100, h.stats
print(peak() - before)
"""


@pytest.mark.parametrize("way", ["direct", pytest.param("buffered", marks=pytest.mark.exhaustive)])
def test_memory_stays_within_what_was_given(tmp_path: Path, way: str) -> None:
    pack_experts(MoE(256, 128, 256), tmp_path / "experts")  # 64 MiB
    command = [sys.executable, "-c", _MEASURE, str(tmp_path / "experts"), way]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert int(done.stdout) <= (16 << 20) + (8 << 20)  # activations, and threads' own
