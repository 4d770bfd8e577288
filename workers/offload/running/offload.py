"""Runs a model with its experts out of memory."""

from contextlib import closing
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Lock

import numpy as np
import torch
from torch import Tensor, nn

from chassis.closing import Closing
from workers import ops
from workers.moe.layer import MoE
from workers.offload.choice.choice import MODES, Choice, choose
from workers.offload.choice.replay import BELADY, replay
from workers.offload.choice.trace import Recorder, Trace, read_trace
from workers.offload.experts.layout import ExpertFileError, LayerAt
from workers.offload.experts.pack import write
from workers.offload.experts.packed import PackedExperts
from workers.offload.experts.source import Source, moe_layers, of_model
from workers.offload.running.bare import strip
from workers.offload.running.size import bytes_of
from workers.offload.slots.cache import Cache
from workers.offload.slots.memory import lock
from workers.offload.slots.policy import POLICIES
from workers.offload.slots.ring import Ring
from workers.offload.slots.store import Stats, Store
from workers.ops.grouped_ffn import backend_for


class Offload(Closing):
    """A model's experts out of memory; the model runs until this is closed.

    Attributes:
        path: of the file of experts.
        mode: cache | ring.
        policy: by which experts give way in mode cache.
        slots: experts, in mode ring sections of some, that have room in memory.
        ahead: further experts, of those that are read before it is certain that they are needed.
        experts: of all layers.
        locked: whether slots and the rest of the model are locked in memory; where the process may
            not (`ulimit -l`), they are kept there as long as the host does not swap.
        expected: of each mode that was looked at, what a forward was expected to take.
    """

    def __init__(self, store: Store, choice: Choice, locked: bool, recorder: Recorder | None):
        self._store, self._recorder = store, recorder
        self.path, self.slots, self.locked = store.packed.path, store.slots, locked
        self.mode, self.policy, self.expected = choice.mode, choice.policy, choice.expected
        self.ahead = choice.ahead if choice.mode == "cache" else 0
        self.experts = sum(layer.experts for layer in store.packed.layers)

    @property
    def stats(self) -> Stats:
        """Hits, misses, bytes and times so far."""
        return self._store.stats

    def line(self) -> str:
        """What it came to, in a line; with what Belady's choice had hit where it is traced."""
        stats = self.stats
        line = (
            f"{self.mode}: {stats.tokens} tokens, {stats.bytes_read / max(1, stats.tokens):,.0f} "
            f"bytes read a token, hit rate {stats.hit_rate:.1%}"
        )
        if self._recorder is not None and self.mode == "cache":
            self._recorder.flush()
            least = replay(read_trace(self._recorder.path), self.slots, BELADY)
            line += f" (Belady's {least.hit_rate:.1%})"
        if stats.ahead:
            line += f", {stats.ahead / max(1, stats.misses):.0%} of misses read ahead"
        return f"{line}, disk idle {stats.disk_idle:.0%}"

    def close(self) -> None:
        """Close the file; forwards of the model fail from now on."""
        if self._recorder is not None:
            self._recorder.close()
        self._store.close()


def offload(
    model: nn.Module,
    memory: int | str,
    *,
    path: str | Path,
    mode: str = "auto",
    batch: int = 1,
    policy: str = "auto",
    like: str | Path | Trace | None = None,
    trace: str | Path | None = None,
    readers: int = 8,
    direct: bool = True,
    ahead: bool = True,
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
        mode: cache: those in memory that are likely to be needed, for small batches; ring: read all
            in their order, for batches that need nearly all; auto: what is expected to be faster
            for `batch` on this machine, which is measured for half a second.
        batch: tokens of a forward, for `mode` and `policy` to be chosen by.
        policy: lru | lfu | lfu-decay | clock: who gives way to an expert that is read. auto: which
            would have read least of `like`; without that lfu-decay.
        like: a trace of forwards that are like those to come, token by token, see `trace`. Without
            one all experts are taken for equally likely, which is the worst case.
        trace: a file to write which experts each forward needed.
        readers: threads that read.
        direct: read past the page cache, where the file system allows that.
        ahead: in mode cache, and of one or two tokens, read what the next layer is likely to need.

    Raises:
        ExpertFileError: the file is damaged, or has other experts than the model.
        TraceError: `like` is damaged, or of other layers.
        ValueError: an argument out of range, or a model that is not on a CPU.
        OSError: a file can be neither read nor written.
    """
    _check(mode, policy, readers, batch)
    allowed = bytes_of(memory, "offload: memory")
    layers, sources = moe_layers(model), of_model(model)
    check_devices(model)
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
            if not is_own and not on_meta(layer):
                _require_equal(source, packed.layers[places[source.layer.name]], packed.path)
        known = read_trace(like) if isinstance(like, str | Path) else like
        k = {places[name]: layer.k for name, layer in layers.items()}
        choice = choose(
            packed,
            allowed,
            mode,
            policy,
            batch,
            [k[i] for i in range(len(k))],
            known,
            readers,
            ahead=ahead,
        )
        store: Store
        if choice.mode == "cache":
            policy = choice.policy
            store = Cache(packed, choice.slots, POLICIES[policy](), readers, choice.ahead)
        else:
            assert choice.ring is not None
            store = Ring(packed, choice.ring, readers)
    except BaseException:
        packed.close()
        raise
    recorder = None
    if trace is not None:
        sizes = [packed.layers[places[name]].extent for name in layers]
        recorder = Recorder(layers, sizes, trace)
    guard = Lock()
    following = {name: (places[other], layers[other]) for name, other in pairwise(layers)}
    for i, (name, layer) in enumerate(layers.items()):
        next_one = following.get(name)
        layer.outside = _Outside(store, places[name], layer, next_one, guard, counts=i == 0)
        strip(layer, name)
    model.register_forward_pre_hook(lambda *_: store.enter(anew=True))
    model.register_forward_hook(lambda *_: store.leave(), always_call=True)
    model.requires_grad_(False)
    locked = store.locked
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.clone()  # pages of a mapped file could be reclaimed
            locked = (tensor.nbytes == 0 or lock(tensor)) and locked
    return Offload(store, choice, locked, recorder)


class _Outside:
    """One layer's experts, by their number; and the layer that follows, with its number."""

    def __init__(
        self,
        store: Store,
        index: int,
        layer: MoE,
        following: tuple[int, MoE] | None,
        guard: Lock,
        counts: bool,
    ) -> None:
        self._store, self._index, self._lock, self._counts = store, index, guard, counts
        self._following = following
        self._at = store.packed.layers[index]
        self._layer = layer
        self._modules = layer.experts
        self._ffn: ops.FfnAt | None = None
        if layer.experts is None:
            w1, w2 = self._at.tensors
            self._ffn = ops.FfnAt(w1.at, w2.at, w2.shape[0], layer.activation)

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
        tokens = int(self._layer.load.sum()) // self._layer.k if self._counts else 0
        with self._lock:
            self._store.enter()
            try:
                self._store.count(tokens)
                return self._run(rows_RD.detach(), offsets, bounds, wanted)
            finally:
                self._store.leave()

    def _run(self, rows: Tensor, offsets: Tensor, bounds: list[int], wanted: list[int]) -> Tensor:
        at_once = self._at_once(rows)
        out = torch.empty_like(rows)
        parts: dict[int, Tensor] = {}
        guess = partial(self._guess, rows)
        with closing(self._store.arrivals(self._index, wanted, guess)) as arrivals:
            for ready in arrivals:
                if at_once is not None:
                    places = np.full(self._at.experts, -1)
                    places[[*ready.places]] = [*ready.places.values()]
                    at = torch.from_numpy(places)
                    ops.grouped_ffn_at(rows, offsets, at, ready.memory, at_once, out)
                    continue
                for e, place in ready.places.items():
                    extent = ready.memory[place]
                    tensors = {at.name: at.of(extent) for at in self._at.tensors}
                    one = self._run_one(e, rows[bounds[e] : bounds[e + 1]], tensors)
                    weights = extent.untyped_storage().data_ptr()
                    mine = one.untyped_storage().data_ptr() != weights
                    parts[e] = one if mine else one.clone()  # a slot's next expert would show
        return torch.cat([parts[e] for e in wanted]) if parts else out

    def _guess(self, rows: Tensor) -> list[tuple[int, int]]:
        """What the next layer will need, by what its gate says of this one's input."""
        if self._following is None:
            return []
        index, layer = self._following
        if rows.shape[1] != layer.dim or len(rows) == 0:
            return []
        tokens = len(rows) // self._layer.k
        if tokens == 1:  # whose rows are all the same
            likely = layer.gate.guess(rows[:1])[0].topk(layer.k)
        else:
            most = min(layer.num_experts, tokens * layer.k)
            likely = layer.gate.guess(rows).sum(dim=0).topk(most)
        return [(index, e) for e in likely.indices.tolist()]

    def _at_once(self, rows: Tensor) -> ops.FfnAt | None:
        """How to compute several by one call, where that gives the resident model's bits."""
        dtype = self._at.tensors[0].dtype
        plain = rows.dtype == dtype and not torch.is_autocast_enabled("cpu")
        alike = plain and self._ffn is not None and backend_for(rows, rows, rows) == "native"
        return self._ffn if alike else None

    def _run_one(self, expert: int, rows: Tensor, tensors: dict[str, Tensor]) -> Tensor:
        if self._modules is not None:
            out: Tensor = torch.func.functional_call(self._modules[expert], tensors, (rows,))
            return out
        w1, w2 = tensors["w1"][None], tensors["w2"][None]
        return ops.grouped_ffn(rows, torch.tensor([0, len(rows)]), w1, w2, self._layer.activation)


def _check(mode: str, policy: str, readers: int, batch: int) -> None:
    if mode not in MODES:
        raise ValueError(f"offload: mode: expected {', '.join(MODES)}, got {mode!r}")
    if policy not in ("auto", *POLICIES):
        raise ValueError(f"offload: policy: expected auto, {', '.join(POLICIES)}, got {policy!r}")
    for name, value in (("readers", readers), ("batch", batch)):
        if value < 1:
            raise ValueError(f"offload: {name}: expected at least 1, got {value}")


def check_devices(model: nn.Module) -> None:
    """See that a model is on a CPU, or on meta.

    Raises:
        ValueError: it is elsewhere.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if tensor.device.type not in ("cpu", "meta"):
            raise ValueError(f"offload: {name}: expected a model on a CPU, got {tensor.device}")


def on_meta(layer: MoE) -> bool:
    """Whether a layer's experts, or some of them, have sizes alone."""
    tensors = [layer.w1, layer.w2] if layer.experts is None else list(layer.experts.parameters())
    return any(one.is_meta for one in tensors)


def _require_values(layers: dict[str, MoE], file: Path) -> None:
    for name, layer in layers.items():
        if on_meta(layer):
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
