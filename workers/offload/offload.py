"""Runs a model with its experts out of memory."""

import re
import warnings
from contextlib import closing
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn

from chassis.closing import Closing
from workers import ops
from workers.moe.layer import MoE
from workers.offload.cache import Cache, Stats
from workers.offload.layout import ExpertFileError, LayerAt
from workers.offload.pack import write
from workers.offload.packed import PackedExperts
from workers.offload.policy import POLICIES
from workers.offload.source import Source, moe_layers, of_model

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class Offload(Closing):
    """A model's experts out of memory; the model runs until this is closed.

    Attributes:
        path: of the file of experts.
        slots: experts that have room in memory.
        experts: of all layers.
    """

    def __init__(self, cache: Cache) -> None:
        self._cache = cache
        self.path, self.slots = cache.packed.path, cache.slots
        self.experts = sum(layer.experts for layer in cache.packed.layers)

    @property
    def stats(self) -> Stats:
        """Hits, misses and bytes so far."""
        return self._cache.stats

    def close(self) -> None:
        """Close the file; forwards of the model fail from now on."""
        self._cache.close()


def offload(
    model: nn.Module,
    memory: int | str,
    *,
    path: str | Path,
    policy: str = "lfu",
    readers: int = 8,
    direct: bool = True,
) -> Offload:
    """Have a model's experts lie in a file and in `memory`, for inference on a CPU.

    Changes the model, in place: its MoE layers lose the parameters of their experts, and the rest
    neither asks for gradients nor lies in files that are mapped. Outputs are those of the model as
    it was, bit for bit, at equal batches, threads and backends. One forward runs at a time.

    Args:
        model: with `heterps.MoE` layers; what is not an expert has values, experts may be on meta.
        memory: for experts, in bytes or as "2GB", "512MiB". What the rest of the model, its
            activations and the process take comes on top.
        path: the file of experts; written by the model's own where there is none.
        policy: lfu | lru | clock: who gives way to an expert that is read.
        readers: threads that read.
        direct: read past the page cache, where the file system allows that.

    Raises:
        ExpertFileError: the file is damaged, or has other experts than the model.
        ValueError: an argument out of range, or a model that is not on a CPU.
        OSError: the file can be neither read nor written.
    """
    if policy not in POLICIES:
        raise ValueError(f"offload: policy: expected {', '.join(POLICIES)}, got {policy!r}")
    if readers < 1:
        raise ValueError(f"offload: readers: expected at least 1, got {readers}")
    allowed = _bytes_of(memory)
    layers, sources = moe_layers(model), of_model(model)
    _check_devices(model)
    file = Path(path)
    is_own = not file.exists()
    if is_own:
        _require_values(layers, file)
        write(sources, file)
    packed = PackedExperts(file, direct=direct)
    try:
        packed.require([source.layer for source in sources])
        places = {layer.name: i for i, layer in enumerate(packed.layers)}
        for source, layer in zip(sources, layers.values(), strict=True):
            if not is_own and not _on_meta(layer):
                _require_equal(source, packed.layers[places[source.layer.name]], packed.path)
        extent = max(layer.extent for layer in packed.layers)
        slots = min(allowed // extent, sum(layer.experts for layer in packed.layers))
        if slots < 1:
            raise ValueError(
                f"offload: memory: expected at least {extent} bytes, which the largest expert "
                f"takes, got {allowed}"
            )
        cache = Cache(packed, slots, POLICIES[policy](), readers)
    except BaseException:
        packed.close()
        raise
    _warn_below_cliff(slots, layers, extent)
    lock = Lock()
    for name, layer in layers.items():
        layer.outside = _Outside(cache, places[name], layer, lock)
        _strip(layer, name)
    model.requires_grad_(False)
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.clone()  # pages of a mapped file could be reclaimed
    return Offload(cache)


class _Outside:
    """One layer's experts, by their number."""

    def __init__(self, cache: Cache, index: int, layer: MoE, lock: Lock) -> None:
        self._cache, self._index, self._lock = cache, index, lock
        self._at = cache.packed.layers[index]
        self._modules = layer.experts
        self._activation = layer.activation

    def run(self, rows_RD: Tensor, offsets: Tensor) -> Tensor:  # noqa: N803
        """Rows [R, D] in the order of their experts -> [R, D]."""
        if rows_RD.device.type != "cpu":
            raise ValueError(f"offload: expected rows on a CPU, got {rows_RD.device}")
        if torch.is_grad_enabled() and rows_RD.requires_grad:
            raise RuntimeError(
                f"{self._at.name}: its experts are out of memory, which is for inference: expected "
                "a forward under torch.no_grad(), or inputs that ask for no gradients"
            )
        bounds = offsets.tolist()
        wanted = [e for e in range(self._at.experts) if bounds[e] < bounds[e + 1]]
        outputs: dict[int, Tensor] = {}
        with self._lock, closing(self._cache.arrivals(self._index, wanted)) as arrivals:
            for extents in arrivals:
                for e, extent in extents.items():
                    tensors = {at.name: at.of(extent) for at in self._at.tensors}
                    out = self._run_one(e, rows_RD[bounds[e] : bounds[e + 1]], tensors)
                    weights = extent.untyped_storage().data_ptr()
                    mine = out.untyped_storage().data_ptr() != weights
                    outputs[e] = out if mine else out.clone()  # a slot's next expert would show
        return torch.cat([outputs[e] for e in wanted]) if wanted else rows_RD

    def _run_one(self, expert: int, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        if self._modules is not None:
            out: Tensor = torch.func.functional_call(self._modules[expert], tensors, (rows,))
            return out
        w1, w2 = tensors["w1"][None], tensors["w2"][None]
        return ops.grouped_ffn(rows, torch.tensor([0, len(rows)]), w1, w2, self._activation)


def _strip(layer: MoE, name: str) -> None:
    """Take a layer's experts away from it."""
    if layer.experts is None:
        del layer.w1, layer.w2
    else:
        for module in layer.experts:
            _empty(module)

    def refuse_state(*_: Any) -> None:
        raise RuntimeError(
            f"{name}: state_dict: its experts are out of memory; expected a model "
            "that is not offloaded"
        )

    def refuse_loading(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
        own = (f"{prefix}w1", f"{prefix}w2", f"{prefix}experts.")
        if found := next((key for key in state if key.startswith(own)), None):
            raise RuntimeError(f"{found}: load_state_dict: the experts of {name} are out of memory")

    hooks: Any = layer
    hooks.register_state_dict_pre_hook(refuse_state)
    hooks.register_load_state_dict_pre_hook(refuse_loading)


def _empty(expert: nn.Module) -> None:
    """Leave an expert's parameters without memory; what is shared in it stays so."""
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in expert.modules():
        for key, one in module._parameters.items():
            if one is not None:
                stub = nn.Parameter(one.detach().to("meta"), requires_grad=False)
                module._parameters[key] = made.setdefault(one, stub)


def _check_devices(model: nn.Module) -> None:
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"offload: {name}: expected a model on a CPU, got {tensor.device}")


def _on_meta(layer: MoE) -> bool:
    tensors = [layer.w1, layer.w2] if layer.experts is None else list(layer.experts.parameters())
    return any(one.is_meta for one in tensors)


def _require_values(layers: dict[str, MoE], file: Path) -> None:
    for name, layer in layers.items():
        if _on_meta(layer):
            raise ExpertFileError(
                f"{file}: expected the experts of {name} in it, which has none itself: there is no "
                "such file; write it with heterps.pack_experts"
            )


def _require_equal(source: Source, at: LayerAt, path: str) -> None:
    """See that the file has the very experts that the model has."""
    extent = torch.empty(at.extent, dtype=torch.uint8)
    for e in range(at.experts):
        if at.fill(extent, source.expert(e)) != at.checksums[e]:
            raise ExpertFileError(
                f"{path}: layer {at.name!r}: expert {e}: expected the model's, got others: the "
                "file is of other weights; remove it, or give another path"
            )


def _warn_below_cliff(slots: int, layers: dict[str, MoE], extent: int) -> None:
    cycle = sum(min(layer.k, layer.num_experts) for layer in layers.values())
    if slots < min(cycle, sum(layer.num_experts for layer in layers.values())):
        warnings.warn(
            f"offload: memory holds {slots} experts, and one token uses {cycle}: hardly any will "
            f"be met in memory; {cycle * extent:,} bytes hold them",
            stacklevel=3,
        )


def _bytes_of(memory: int | str) -> int:
    if isinstance(memory, int):
        return memory
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMG]I?B)?", memory.strip().upper())
    if match is None:
        raise ValueError(f'offload: memory: expected bytes, or such as "2GB", got {memory!r}')
    return int(float(match[1]) * _UNITS[match[2] or ""])
