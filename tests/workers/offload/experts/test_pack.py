"""Files of experts: what comes out is what went in, and what is damaged is refused."""

import errno
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file
from torch import Tensor, nn

from heterps import MoE, pack_experts
from ps.checkpoint.sealed import digest_of, seal
from tests.disks import small_disk
from workers.model.code.entry import ModelError
from workers.offload.experts.layout import ExpertFileError
from workers.offload.experts.packed import PackedExperts
from workers.offload.experts.source import of_model


class Model(nn.Module):
    """Two layers of stacked experts, and one of modules."""

    def __init__(self, dim: int = 5, hidden: int = 7, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dense = nn.Linear(dim, dim)
        self.blocks = nn.ModuleList(
            [
                MoE(dim, 3, hidden, activation="swiglu", shared_experts=1, seed=1),
                MoE(dim, 2, hidden + 1, seed=2),
                MoE(dim, 2, expert=lambda: nn.Linear(dim, dim), seed=3),
            ]
        )
        self.to(dtype)


def expected(model: Model) -> dict[tuple[str, int], dict[str, Tensor]]:
    """Every expert's tensors, straight from the model."""
    found = {}
    for i, layer in enumerate(model.blocks):
        assert isinstance(layer, MoE)
        for e in range(layer.num_experts):
            if layer.experts is None:
                tensors = {"w1": layer.w1[e], "w2": layer.w2[e]}
            else:
                tensors = dict(layer.experts[e].named_parameters())
            found[f"blocks.{i}", e] = tensors
    return found


@settings(max_examples=20)
@given(
    dim=st.integers(1, 40),
    hidden=st.integers(1, 70),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64]),
    direct=st.booleans(),
)
def test_experts_come_out_as_they_went_in(
    tmp_path_factory: pytest.TempPathFactory,
    dim: int,
    hidden: int,
    dtype: torch.dtype,
    direct: bool,
) -> None:
    path = tmp_path_factory.mktemp("pack") / "experts"
    model = Model(dim, hidden, dtype)
    pack_experts(model, path)
    with PackedExperts(path, direct=direct) as packed:
        packed.require([source.layer for source in of_model(model)])
        for (layer, expert), tensors in expected(model).items():
            got = packed.expert(layer, expert)
            assert got.keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert torch.equal(got[name], tensor)
                assert got[name].data_ptr() % 64 == 0
        for at in packed.layers:
            assert at.start % 4096 == at.extent % 4096 == 0


def test_any_flipped_bit_and_any_cut_is_told(tmp_path: Path) -> None:
    path = tmp_path / "experts"
    layers = pack_experts(Model(), path)
    whole = path.read_bytes()
    read_all(path)
    header = layers[0].start
    in_use = {
        0: "begins with",
        12: "header",
        200: "header",
        layers[1].at(1) + 64: "layer 'blocks.1': expert 1: expected checksum",
        len(whole) - 1: "layer 'blocks.2': expert 1: expected checksum",  # padding, too
    }
    for at, told in in_use.items():
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
        with pytest.raises(ExpertFileError, match=told) as error:
            read_all(path)
        assert str(path) in str(error.value)
    for size in (0, 7, 19, 300, header, layers[1].at(1) + 5, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ExpertFileError) as error:
            read_all(path)
        assert str(path) in str(error.value)
    path.write_bytes(whole[: layers[1].at(1) + 5])
    with pytest.raises(ExpertFileError, match=r"'blocks.1': expert 1: the file is cut short"):
        read_all(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(ExpertFileError, match=f"expected {len(whole)} bytes"):
        read_all(path)


def test_a_file_of_another_model_is_refused(tmp_path: Path) -> None:
    pack_experts(Model(5, 7), tmp_path / "experts")
    with PackedExperts(tmp_path / "experts") as packed:
        for other in (Model(5, 8), Model(5, 7, torch.float64)):
            with pytest.raises(ExpertFileError, match=r"blocks\.0"):
                packed.require([source.layer for source in of_model(other)])
        with pytest.raises(ExpertFileError, match="expected the layers"):
            packed.require([source.layer for source in of_model(Model().blocks)])


@pytest.mark.parametrize("names", ["mixtral", "olmoe", "qwen"])
@pytest.mark.parametrize("sharded", [False, True])
def test_a_familys_checkpoint_gives_its_swiglu_experts(
    tmp_path: Path, names: str, sharded: bool
) -> None:
    """Beside a SwiGLU by plain products with the checkpoint's own matrices."""
    dim, hidden, experts, generator = 6, 10, 11, torch.Generator().manual_seed(0)
    middle, parts = {
        "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
        "olmoe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
        "qwen": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    }[names]
    shapes = [(hidden, dim), (hidden, dim), (dim, hidden)]
    state = {
        f"model.layers.{layer}.{middle}.experts.{e}.{part}.weight": torch.randn(
            shape, generator=generator, dtype=torch.float64
        )
        for layer in (2, 10)
        for e in range(experts)
        for part, shape in zip(parts, shapes, strict=True)
    } | {"model.embed_tokens.weight": torch.zeros(3, dim)}
    if sharded:
        names_of = sorted(state)
        half = len(names_of) // 2
        files = {"a.safetensors": names_of[:half], "b.safetensors": names_of[half:]}
        for file, keys in files.items():
            save_file({key: state[key] for key in keys}, tmp_path / file)
        places = {key: file for file, keys in files.items() for key in keys}
        text = str({"weight_map": places}).replace("'", '"')
        (tmp_path / "model.safetensors.index.json").write_text(text)
    else:
        save_file(state, tmp_path / "model.safetensors")
    layers = pack_experts(tmp_path, tmp_path / "experts", names=names, layers="blocks.{}.moe")
    assert [one.name for one in layers] == ["blocks.2.moe", "blocks.10.moe"]
    moe = MoE(dim, experts, hidden, activation="swiglu").double()
    x = torch.randn(4, dim, generator=generator, dtype=torch.float64)
    with PackedExperts(tmp_path / "experts") as packed:
        for e in range(experts):
            got = packed.expert("blocks.10.moe", e)
            gate, up, down = (
                state[f"model.layers.10.{middle}.experts.{e}.{part}.weight"] for part in parts
            )
            want = (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T
            torch.testing.assert_close(moe._run_one(x, got), want)


def test_a_checkpoint_of_ours_gives_its_experts(tmp_path: Path) -> None:
    model = Model()
    del model.blocks[2]
    save_file(model.state_dict(), tmp_path / "dense.safetensors")
    pack_experts(tmp_path / "dense.safetensors", tmp_path / "experts")
    with PackedExperts(tmp_path / "experts") as packed:
        packed.require([source.layer for source in of_model(model)])
        for (layer, expert), tensors in expected(model).items():
            got = packed.expert(layer, expert)
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())


def test_a_saved_job_gives_the_experts_that_it_was_saved_with(tmp_path: Path) -> None:
    model, folder = Model(), tmp_path / "model"
    del model.blocks[2]
    folder.mkdir()
    dense = save(model.state_dict())
    (folder / "dense.safetensors").write_bytes(dense)
    (folder / "model.json").write_bytes(seal({"dense.safetensors": digest_of(dense)}))
    pack_experts(folder, tmp_path / "experts")
    read_all(tmp_path / "experts")
    with PackedExperts(tmp_path / "experts") as packed:
        for (layer, expert), tensors in expected(model).items():
            got = packed.expert(layer, expert)
            assert all(torch.equal(got[name], tensor) for name, tensor in tensors.items())
    (folder / "dense.safetensors").write_bytes(dense[:-1] + bytes([dense[-1] ^ 1]))
    with pytest.raises(ModelError, match="SHA-256"):
        pack_experts(folder, tmp_path / "other")


_MEASURE = """
import sys
from pathlib import Path
from heterps import pack_experts

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

pack_experts(sys.argv[1] + "/small.safetensors", sys.argv[2])
Path("/proc/self/clear_refs").write_text("5")
before = peak()
pack_experts(sys.argv[1] + "/large.safetensors", sys.argv[2])
print(peak() - before)
"""


def test_a_checkpoint_is_packed_in_the_memory_of_two_experts(tmp_path: Path) -> None:
    dim, hidden, experts = 256, 256, 48  # an expert takes 512 KiB
    for name, count in (("small", 1), ("large", experts)):
        stacked = {"w1": torch.ones(count, dim, hidden), "w2": torch.ones(count, hidden, dim)}
        save_file(stacked, tmp_path / f"{name}.safetensors")
    command = [sys.executable, "-c", _MEASURE, str(tmp_path), str(tmp_path / "experts")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    read_all(tmp_path / "experts")
    assert int(done.stdout) <= 4 << 20  # of 24 MiB; the rest is the allocator's


def test_what_a_checkpoint_lacks_is_told(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    names = [f"m.0.experts.{e}.{part}.weight" for e in (0, 2) for part in ("w1", "w2", "w3")]
    save_file({name: torch.zeros(2, 2) for name in names}, path)
    with pytest.raises(ExpertFileError, match=r"m\.0\.experts\.1\.w1\.weight"):
        pack_experts(path, tmp_path / "experts", names="mixtral")
    with pytest.raises(ExpertFileError, match="found none"):
        pack_experts(path, tmp_path / "experts", names="qwen")
    with pytest.raises(ExpertFileError, match="expected one of heterps, mixtral"):
        pack_experts(path, tmp_path / "experts", names="gpt")
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ExpertFileError, match="cut short"):
        pack_experts(path, tmp_path / "experts", names="mixtral")
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_experts_that_are_no_plain_swiglu_are_refused(tmp_path: Path) -> None:
    weights = {f"m.0.experts.0.{part}.weight": torch.zeros(2, 2) for part in ("w1", "w2", "w3")}
    elsewhere = {"m.0.gate.bias": torch.zeros(1), "m.1.experts.0.bias": torch.zeros(1)}
    path, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    save_file(weights | elsewhere, path)
    config.write_text('{"hidden_act": "gelu"}')
    with pytest.raises(ExpertFileError, match=r"hidden_act: expected silu, .* got 'gelu'"):
        pack_experts(tmp_path, tmp_path / "experts", names="mixtral")
    for damaged in (b'{"hidden_act": ', b"[]", b"\xff\xfe\xfa"):
        config.write_bytes(damaged)
        with pytest.raises(ExpertFileError, match=r"config\.json: expected a JSON object"):
            pack_experts(tmp_path, tmp_path / "damaged", names="mixtral")
    config.write_text('{"hidden_act": "silu"}')
    assert pack_experts(tmp_path, tmp_path / "experts", names="mixtral")
    save_file(weights | {"m.0.experts.0.w1.bias": torch.ones(2)}, path)
    with pytest.raises(ExpertFileError, match=r"m\.0\.experts\.0\.w1\.bias: an expert would be"):
        pack_experts(tmp_path, tmp_path / "other", names="mixtral")


def test_a_full_disk_leaves_the_old_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 200 << 10) as disk:
        path = disk.path / "experts"
        pack_experts(Model(), path)
        old = path.read_bytes()
        with pytest.raises(OSError, match=r"experts of .* bytes are to be written") as error:
            pack_experts(Model(40, 900), path)
        assert error.value.errno == errno.ENOSPC
        assert error.value.filename == str(path)
        assert path.read_bytes() == old
        assert os.listdir(disk.path) == ["experts"]


_PACK = """
import sys, torch
from heterps import MoE, pack_experts
model = MoE(64, 64, 2048, seed=1)
print("ready", flush=True)
while True:
    pack_experts(model, sys.argv[1])
"""


@pytest.mark.parametrize(
    "delay", [0.3, *(pytest.param(one, marks=pytest.mark.exhaustive) for one in (0.0, 0.05, 0.6))]
)
def test_a_file_that_is_there_is_whole_whenever_its_writer_is_killed(
    tmp_path: Path, delay: float
) -> None:
    path = tmp_path / "experts"
    command = [sys.executable, "-c", _PACK, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        process.send_signal(signal.SIGKILL)
    if path.exists():
        read_all(path)
    for left in tmp_path.glob(".experts.*"):
        if left.read_bytes()[:8].strip(b"\0"):  # killed between its last write and its name: whole
            read_all(left)
        else:
            with pytest.raises(ExpertFileError):
                read_all(left)


def read_all(path: Path) -> None:
    with PackedExperts(path) as packed:
        for layer in packed.layers:
            for expert in range(layer.experts):
                packed.expert(layer.name, expert)
