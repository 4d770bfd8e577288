"""Exports: every mode and chain, read back by pyarrow and safetensors; all or nothing."""

import hashlib
import json
import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.numpy import load_file

from ps import CheckpointError, LocalShards, LocalTable, ParameterClient, export_checkpoint
from ps.local.table import save_checkpoint
from ps.table.rules import Admission, Eviction, Score, Segment

Rows = dict[int, NDArray[np.float32]]
KEYS = np.concatenate([np.arange(2000), [-1, 2**62]]).astype(np.int64).view(np.uint64)
LAZY = (
    Segment(dim=1, optimizer="ftrl", learning_rate=0.1),
    Segment(dim=4, optimizer="adam", learning_rate=0.1, scale=1.0, lazy=3.0),
)
TABLES = {
    "plain": (4, {"optimizer": "adam", "seed": 1, "eviction": Eviction(ttl_steps=5)}),
    "half": (3, {"optimizer": "adagrad", "dtype": "float16", "stochastic_rounding": True}),
    "bytes": (6, {"optimizer": "momentum", "dtype": "int8"}),
    "lazy": (5, {"segments": LAZY, "score": Score(non_click=1.0)}),
    "rare": (2, {"admission": Admission(kind="bloom", threshold=2, capacity=5000)}),
}


def parquet_rows(path: Path) -> Rows:
    table = pq.read_table(path)
    dim = table.schema.field("values").type.list_size
    values = table["values"].combine_chunks().flatten().to_numpy().reshape(-1, dim)
    return dict(zip(table["key"].to_pylist(), values, strict=True))


def tensor_rows(path: Path, name: str) -> Rows:
    found = load_file(path)
    assert found[f"{name}.keys"].dtype == np.int64
    keys = found[f"{name}.keys"].view(np.uint64).tolist()
    return dict(zip(keys, found[f"{name}.values"], strict=True))


def same(rows: Rows, keys: NDArray[np.uint64], wanted: NDArray[np.float32]) -> None:
    assert sorted(rows) == sorted(keys.tolist())
    np.testing.assert_array_equal(np.stack([rows[int(k)] for k in keys]), wanted)


def push(client: ParameterClient, prefix: str, keys: NDArray[np.uint64], step: int) -> None:
    rng = np.random.default_rng(step)
    for name, (dim, _) in TABLES.items():
        grads = rng.standard_normal((len(keys), dim)).astype(np.float32)
        client.push(prefix + name, keys, grads, step=step)


@pytest.fixture(scope="module")
def chains(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """A full chain and a serving chain of the same cuts, and the rows at the last."""
    root = tmp_path_factory.mktemp("chains")
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        for name, (dim, options) in TABLES.items():
            client.create_table(f"x.{name}", dim, **options)  # type: ignore[arg-type]
        push(client, "x.", KEYS, 1)
        push(client, "x.", KEYS[:1500], 2)
        client.save(root / "c0")
        client.save(root / "b0", mode="base")
        push(client, "x.", KEYS[1000:1010], 9)
        push(client, "x.", KEYS[-2:], 9)
        assert client.shrink("x.plain", step=9) == len(KEYS) - 12
        client.save(root / "c1", mode="delta", since=root / "c0")
        client.save(root / "b1", mode="serving", since=root / "b0")
        push(client, "x.", KEYS[100:110], 9)  # some come back
        push(client, "x.", np.arange(5000, 5100, dtype=np.uint64), 9)
        client.save(root / "c2", mode="delta", since=root / "c1")
        client.save(root / "b2", mode="serving", since=root / "b1")
        client.save(root / "whole")
        keys = {name: np.sort(client.keys(f"x.{name}", 1 << 20)) for name in TABLES}
        rows = {name: client.pull(f"x.{name}", keys[name]) for name in TABLES}
    assert len(keys["plain"]) == 122
    assert 100 > len(keys["rare"]) - 1500 > 0
    return {"root": root, "keys": keys, "rows": rows}


@pytest.mark.parametrize("save", ["c2", "b2", "whole"])
@pytest.mark.parametrize("format", ["parquet", "safetensors"])
def test_every_chain_exports_the_same_rows(
    chains: dict[str, object], tmp_path: Path, save: str, format: str
) -> None:
    root, keys, rows = chains["root"], chains["keys"], chains["rows"]
    assert isinstance(root, Path)
    assert isinstance(keys, dict)
    assert isinstance(rows, dict)
    made = export_checkpoint(root / save, tmp_path / "out", format)
    assert made.rows == sum(map(len, keys.values()))
    for name in TABLES:
        path = tmp_path / "out" / "tables" / f"x.{name}.{format}"
        found = parquet_rows(path) if format == "parquet" else tensor_rows(path, f"x.{name}")
        same(found, keys[name], rows[name])
    manifest = json.loads((tmp_path / "out" / "export.json").read_text())
    assert manifest["tables"]["x.half"]["dtype"] == "float16"
    for file in manifest["files"]:
        data = (tmp_path / "out" / file["name"]).read_bytes()
        assert len(data) == file["bytes"]
        assert hashlib.sha256(data).hexdigest() == file["sha256"]
    assert os.listdir(tmp_path) == ["out"]


def test_types_metadata_and_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ps.serving.export_files._GROUP_BYTES", 40 * 300)
    table = LocalTable.create("t", 8, scale=1.0, seed=3)
    table.push(np.arange(50_000), np.ones((50_000, 8), np.float32))
    save_checkpoint(tmp_path / "ck", [table, LocalTable.create("void", 2)])
    export_checkpoint(tmp_path / "ck", tmp_path / "pq", dtype="float16")
    file = pq.ParquetFile(tmp_path / "pq" / "tables" / "t.parquet")
    assert file.num_row_groups > 10
    assert file.metadata.num_rows == 50_000
    assert file.schema_arrow.field("key").type == pa.uint64()
    assert file.schema_arrow.field("values").type == pa.list_(pa.float16(), 8)
    spec = json.loads(file.schema_arrow.metadata[b"heterps.spec"])
    assert (spec["name"], spec["dim"], spec["initializer"]["seed"]) == ("t", 8, "3")
    rows = parquet_rows(tmp_path / "pq" / "tables" / "t.parquet")
    same(rows, np.arange(50_000, dtype=np.uint64), table.pull(np.arange(50_000)).astype("f2"))
    assert parquet_rows(tmp_path / "pq" / "tables" / "void.parquet") == {}

    export_checkpoint(tmp_path / "ck", tmp_path / "st", "safetensors", "float16")
    with safe_open(tmp_path / "st" / "tables" / "t.safetensors", "pt") as tensors:
        assert json.loads(tensors.metadata()["heterps.spec"]) == spec
        assert tensors.get_tensor("t.values").dtype == torch.float16
        assert tensors.get_tensor("t.keys").dtype == torch.int64
    assert load_file(tmp_path / "st" / "tables" / "void.safetensors")["void.values"].shape == (0, 2)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    table = LocalTable.create("user", 2)
    table.push([7, 8], np.float32([[1e5, 2], [3, 4]]), kind="assign")
    save_checkpoint(tmp_path / "ck", [table, LocalTable.create("item", 2)])
    return tmp_path / "ck"


def test_dense_weights_lie_beside(saved: Path, tmp_path: Path) -> None:
    dense = {"w": torch.arange(6.0).reshape(2, 3).T, "b": torch.ones(2, dtype=torch.bfloat16)}
    export_checkpoint(saved, tmp_path / "a", tables=["user"], dense=dense)
    assert os.listdir(tmp_path / "a" / "tables") == ["user.parquet"]
    with safe_open(tmp_path / "a" / "dense.safetensors", "pt") as found:
        assert torch.equal(found.get_tensor("w"), dense["w"])
        assert found.get_tensor("b").dtype == torch.bfloat16
    export_checkpoint(saved, tmp_path / "b", dense=tmp_path / "a" / "dense.safetensors")
    export_checkpoint(saved, tmp_path / "c", dense={"w": np.ones(3, np.float32)})
    data = [(tmp_path / d / "dense.safetensors").read_bytes() for d in "ab"]
    assert data[0] == data[1]
    assert load_file(tmp_path / "c" / "dense.safetensors")["w"].tolist() == [1, 1, 1]


def test_mistakes_leave_nothing(saved: Path, tmp_path: Path) -> None:
    before = sorted(os.listdir(tmp_path))
    out = tmp_path / "out"
    with pytest.raises(CheckpointError, match=r"no table 'usr'.*did you mean 'user'"):
        export_checkpoint(saved, out, tables=["usr"])
    with pytest.raises(CheckpointError, match="key 7 has 100000 at element 0, beyond float16"):
        export_checkpoint(saved, out, dtype="float16")
    with pytest.raises(CheckpointError, match=r"manifest.json: .*expected a safetensors file"):
        export_checkpoint(saved, out, dense=saved / "manifest.json")
    with pytest.raises(CheckpointError, match=r"dense: .*expected tensors by name"):
        export_checkpoint(saved, out, dense={"w": "text"})
    with pytest.raises(ValueError, match="format='csv'"):
        export_checkpoint(saved, out, "csv")
    with pytest.raises(CheckpointError, match="exists and is not a finished export"):
        export_checkpoint(saved, saved)
    with pytest.raises(CheckpointError, match="not found"):
        export_checkpoint(tmp_path / "nowhere", out)
    file = next(saved.glob("*/*.user.rows"))
    data = bytearray(file.read_bytes())
    data[-20] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{file.name}.*SHA-256"):
        export_checkpoint(saved, out)
    assert sorted(os.listdir(tmp_path)) == before


@pytest.mark.parametrize("scheme", ["", "memory://"])
def test_an_export_is_replaced_only_when_told(saved: Path, tmp_path: Path, scheme: str) -> None:
    import fsspec

    target = f"{scheme}{tmp_path}/out"
    export_checkpoint(saved, target)
    with pytest.raises(CheckpointError, match="holds an export"):
        export_checkpoint(saved, target, "safetensors")
    made = export_checkpoint(saved, target, "safetensors", tables=["user"], replace=True)
    files, root = fsspec.core.url_to_fs(target)
    assert sorted(p.removeprefix(root) for p in files.find(root)) == [
        "/export.json",
        "/tables/user.safetensors",
    ]
    assert files.size(f"{root}/tables/user.safetensors") == made.files[-1].bytes
    with pytest.raises(CheckpointError, match="beyond float16"):
        export_checkpoint(saved, target, dtype="float16", replace=True)
    # A rename keeps what was there; an object store has none.
    assert files.exists(f"{root}/export.json") == (not scheme)
