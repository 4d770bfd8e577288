"""Files of dense weights against safetensors' own reader and writer."""

import hashlib
import io
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from workers.model.saved.dense_file import chunks_of, read_from

KINDS = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    return sorted(found) == sorted(expected) and all(
        found[name].dtype == value.dtype
        and found[name].shape == value.shape
        and torch.equal(found[name].view(-1), value.view(-1))
        for name, value in expected.items()
    )


tensors = st.dictionaries(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=9).filter(
        lambda name: name != "__metadata__"
    ),
    st.tuples(st.sampled_from([*KINDS, torch.bool]), st.lists(st.integers(0, 5), max_size=3)),
    max_size=6,
).map(
    lambda found: {
        name: torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(kind)
        for name, (kind, shape) in found.items()
    }
)


@settings(max_examples=60)
@given(tensors)
def test_a_file_is_what_safetensors_reads(state: dict[str, Tensor]) -> None:
    data = b"".join(chunks_of(state))
    assert same(load(data), state)
    assert len(data) - int.from_bytes(data[:8], "little") == 8 + sum(
        t.nbytes for t in state.values()
    )


@pytest.mark.parametrize("on_disk", [True, False], ids=["a file", "a stream"])
def test_what_is_read_is_what_was_written(tmp_path: Path, on_disk: bool) -> None:
    state = {f"{k}": torch.randn(300, 7).to(kind) for k, kind in enumerate(KINDS)}
    path, told = tmp_path / "weights", []
    save_file(state, path)
    data = path.read_bytes()
    with path.open("rb") if on_disk else io.BytesIO(data) as stream:
        found = read_from(stream, told.append)
    assert same(found, load_file(path))
    assert told == [hashlib.sha256(data).hexdigest()]


def test_nothing_is_read_of_a_file_that_is_not_accepted(tmp_path: Path) -> None:
    def refuse(digest: str) -> None:
        raise ValueError(digest)

    torn = save({"x": torch.ones(9)})[:-3]
    with pytest.raises(ValueError, match=hashlib.sha256(torn).hexdigest()):
        read_from(io.BytesIO(torn), refuse)
    with pytest.raises(SafetensorError):
        read_from(io.BytesIO(torn), lambda digest: None)
