"""Experts of checkpoints in safetensors, by the names that families of models give them.

Files are read expert by expert with plain reads: mapped, their pages would count as memory.

Shapes: D width, H hidden width of an expert, E experts.
"""

import json
import os
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from chassis.files import open_regular
from workers.offload.experts.layout import ExpertFileError, LayerAt, TensorAt, check_dtype
from workers.offload.experts.source import Source

# Of a SwiGLU expert: gate [H, D], value [H, D], down [D, H].
NAMES: Final[Mapping[str, tuple[str, str, str]]] = {
    "mixtral": ("w1", "w3", "w2"),
    "olmoe": ("gate_proj", "up_proj", "down_proj"),
    "qwen": ("gate_proj", "up_proj", "down_proj"),
}
FAMILIES: Final = ("heterps", *NAMES)
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_INDEX = "model.safetensors.index.json"
_MOST_HEADER = 1 << 30


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor in a safetensors file, `at` so many bytes from the file's begin."""

    path: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    at: int
    size: int

    def part(self, index: int | None = None) -> Tensor:
        """It, or one of the parts along its first axis, read from the disk into new memory.

        Raises:
            ExpertFileError: the file has become shorter.
        """
        shape, at, size = self.shape, self.at, self.size
        if index is not None:
            shape, size = shape[1:], size // shape[0]
            at += index * size
        memory = bytearray(size)
        with open_regular(self.path) as stream:
            stream.seek(at)
            if stream.readinto(memory) != size:
                raise ExpertFileError(f"{self.path}: {self.name}: the file is cut short")
            os.posix_fadvise(stream.fileno(), at, size, os.POSIX_FADV_DONTNEED)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)


def of_checkpoint(path: Path, names: str, layers: str | None = None) -> list[Source]:
    """The experts of a file, or of a folder with an index of several.

    Args:
        path: FILE.safetensors, or a folder with model.safetensors or its index.
        names: heterps | mixtral | olmoe | qwen; those of a family become `w1` [D, 2H], gate before
            value, and `w2` [H, D] of a MoE with activation="swiglu".
        layers: names of the layers in the model that will read them, {} being the first number in
            the checkpoint's own, such as "blocks.{}.moe". None keeps what comes before `.experts`.

    Raises:
        ExpertFileError: a file is damaged, an expert or a part of one is missing, or experts of a
            family have more than these three weights or, by the folder's config.json, another
            activation.
    """
    if names not in FAMILIES:
        raise ExpertFileError(f"names: expected one of {', '.join(FAMILIES)}, got {names!r}")
    if names in NAMES:
        _check_activation(path / "config.json")
    stored = _stored(path)
    made = _stacked(stored) if names == "heterps" else _family(stored, NAMES[names], path)
    if not made:
        raise ExpertFileError(f"{path}: expected experts with names as of {names}, found none")
    return [Source(_named(one.layer, layers, path), one.expert) for one in made]


def _check_activation(config: Path) -> None:
    """Refuse a family's checkpoint that says of itself that its experts are no SwiGLU ones."""
    if not config.is_file():
        return
    try:
        told = json.loads(config.read_bytes()).get("hidden_act", "silu")
    except (ValueError, AttributeError) as error:
        raise ExpertFileError(f"{config}: expected a JSON object: {error}") from None
    if told not in ("silu", "swish"):
        raise ExpertFileError(
            f"{config}: hidden_act: expected silu, which packed experts compute with, got {told!r}"
        )


def _family(stored: dict[str, Stored], parts: tuple[str, str, str], path: Path) -> list[Source]:
    pattern = re.compile(r"(.+)\.experts\.(\d+)\.(.+)")
    weights = {f"{part}.weight": part for part in parts}
    layers: dict[str, dict[int, dict[str, Stored]]] = {}
    others = []
    for name, one in stored.items():
        if match := pattern.fullmatch(name):
            if match[3] not in weights:
                others.append((match[1], one))
                continue
            expert = layers.setdefault(match[1], {}).setdefault(int(match[2]), {})
            expert[weights[match[3]]] = one
    for base, one in others:
        if base in layers:
            raise ExpertFileError(
                f"{one.path}: {one.name}: an expert would be packed without it; expected "
                f"{', '.join(weights)} alone"
            )
    return [_of_family(base, layers[base], parts, path) for base in sorted(layers, key=_natural)]


def _of_family(
    base: str, experts: dict[int, dict[str, Stored]], parts: tuple[str, str, str], path: Path
) -> Source:
    count = max(experts) + 1
    for e in range(count):
        for part in parts:
            if part not in experts.get(e, {}):
                raise ExpertFileError(
                    f"{path}: expected {base}.experts.{e}.{part}.weight beside the others of "
                    f"{count} experts, it is missing"
                )
    gate = experts[0][parts[0]]
    hidden, dim = gate.shape if len(gate.shape) == 2 else (0, 0)
    expected = {parts[0]: (hidden, dim), parts[1]: (hidden, dim), parts[2]: (dim, hidden)}
    for e in range(count):
        for part in parts:
            one = experts[e][part]
            if one.shape != expected[part] or one.dtype != gate.dtype:
                raise ExpertFileError(
                    f"{one.path}: {one.name}: expected {gate.dtype} {list(expected[part])}, got "
                    f"{one.dtype} {list(one.shape)}"
                )
    tensors = (
        TensorAt("w1", check_dtype(gate.dtype, gate.name), (dim, 2 * hidden)),
        TensorAt("w2", gate.dtype, (hidden, dim)),
    )

    def expert(e: int) -> Sequence[Tensor]:
        first, second, third = (experts[e][part].part() for part in parts)
        return torch.cat([first.t(), second.t()], dim=1), third.t()

    return Source(LayerAt(base, count, "swiglu", tensors), expert)


def _stacked(stored: dict[str, Stored]) -> list[Source]:
    made = []
    for name in sorted(stored, key=_natural):
        base, _, last = name.rpartition(".")
        prefix = f"{base}." if base else ""
        w1, w2 = stored[name], stored.get(f"{prefix}w2")
        if last != "w1" or w2 is None or len(w1.shape) != 3 or len(w2.shape) != 3:
            continue
        experts, dim, _ = w1.shape
        if w2.shape[0] != experts or w2.shape[2] != dim:
            raise ExpertFileError(
                f"{w2.path}: {w2.name}: expected [{experts}, hidden, {dim}] beside {name}, got "
                f"{list(w2.shape)}"
            )
        tensors = tuple(
            TensorAt(key, check_dtype(one.dtype, one.name), one.shape[1:])
            for key, one in (("w1", w1), ("w2", w2))
        )
        made.append(Source(LayerAt(base, experts, "", tensors), _both(w1, w2)))
    return made


def _both(w1: Stored, w2: Stored) -> Callable[[int], Sequence[Tensor]]:
    return lambda expert: (w1.part(expert), w2.part(expert))


def _named(layer: LayerAt, names: str | None, path: Path) -> LayerAt:
    if names is None:
        return layer
    number = re.search(r"\d+", layer.name)
    if number is None or "{}" not in names:
        raise ExpertFileError(
            f"{path}: layers: expected {{}} for the number in {layer.name!r}, got {names!r}"
        )
    name = names.replace("{}", number[0])
    return LayerAt(name, layer.experts, layer.activation, layer.tensors)


def _stored(path: Path) -> dict[str, Stored]:
    if not path.is_dir():
        return _tensors(path)
    index = path / _INDEX
    if not index.is_file():
        return _tensors(path / "model.safetensors")
    places: dict[str, str] = json.loads(index.read_text())["weight_map"]
    files = {name: _tensors(path / name) for name in sorted(set(places.values()))}
    for name, file in places.items():
        if name not in files[file]:
            raise ExpertFileError(f"{path / file}: expected {name}, as {_INDEX} says")
    return {name: files[file][name] for name, file in places.items()}


def _tensors(path: Path) -> dict[str, Stored]:
    with open_regular(path) as stream:
        total = os.fstat(stream.fileno()).st_size
        head = stream.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else _MOST_HEADER
        if size > min(total, _MOST_HEADER) - 8:
            raise ExpertFileError(f"{path}: expected a safetensors file, it has no header")
        try:
            tree = json.loads(stream.read(size))
        except ValueError as error:
            raise ExpertFileError(f"{path}: header: {error}") from None
    found = {}
    for name, told in tree.items():
        dtype = _DTYPES.get(told.get("dtype", ""))
        if name == "__metadata__" or dtype is None:
            continue
        begin, end = told["data_offsets"]
        one = Stored(path, name, dtype, tuple(told["shape"]), 8 + size + begin, end - begin)
        expected = TensorAt(name, dtype, one.shape).size
        if one.size != expected or one.at < 8 + size or one.at + one.size > total:
            raise ExpertFileError(
                f"{path}: {name}: expected {expected} bytes in a file of {total}, got {one.size} "
                f"at {one.at}: it is cut short or damaged"
            )
        found[name] = one
    return found


def _natural(name: str) -> list[tuple[int, str]]:
    parts = re.split(r"(\d+)", name)
    return [(int(part), "") if part.isdigit() else (-1, part) for part in parts]
