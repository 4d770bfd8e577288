"""Which experts each forward of each layer needed, as a file.

heterps experts 1
{"layers": [{"name": "blocks.0.moe", "experts": 32, "bytes": 2097152}, …]}
0 1 5 17        layer, tokens, experts; a line each time that a layer is called
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from torch import Tensor, nn

from chassis.closing import Closing
from workers.moe.layer import MoE
from workers.offload.experts.layout import placed
from workers.offload.experts.source import moe_layers, of_model

_FIRST = "heterps experts 1\n"


class TraceError(ValueError):
    """A file that is no trace of experts, or a damaged one."""


@dataclass(frozen=True, slots=True)
class TracedLayer:
    """A layer: its name, how many experts it has, and bytes of each in the file of experts."""

    name: str
    experts: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a layer: its index, how many tokens, and the experts that these needed."""

    layer: int
    tokens: int
    experts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """What was recorded of a model."""

    layers: tuple[TracedLayer, ...]
    calls: tuple[Call, ...]

    @property
    def tokens(self) -> int:
        """Tokens that went through the layer that most went through."""
        counts = [0] * len(self.layers)
        for call in self.calls:
            counts[call.layer] += call.tokens
        return max(counts, default=0)

    @property
    def extent(self) -> int:
        """Bytes of the largest expert, and so of a slot."""
        return max(layer.bytes for layer in self.layers)

    def keys(self) -> Iterator[tuple[int, ...]]:
        """The experts of each call, by numbers that are one for each expert of the model."""
        first = [0]
        for layer in self.layers:
            first.append(first[-1] + layer.experts)
        for call in self.calls:
            yield tuple(first[call.layer] + e for e in call.experts)

    def in_batches(self, size: int) -> "Trace":
        """As if so many forwards that follow one another had been one."""
        calls: list[Call] = []
        waiting: list[list[Call]] = [[] for _ in self.layers]
        for call in self.calls:
            waiting[call.layer].append(call)
            if len(part := waiting[call.layer]) == size:
                union = sorted({e for one in part for e in one.experts})
                calls.append(Call(call.layer, sum(one.tokens for one in part), tuple(union)))
                part.clear()
        return Trace(self.layers, tuple(calls))


class Recorder(Closing):
    """Writes a trace as a model's layers are called, until it is closed.

    Args:
        layers: of the model, by name; their experts may be out of memory.
        sizes: bytes of an expert of each.
        path: the file; one that is there is replaced.

    Raises:
        OSError: it cannot be written; a forward raises it, too.
    """

    def __init__(self, layers: Mapping[str, MoE], sizes: Sequence[int], path: str | Path) -> None:
        self.path = Path(path)
        self.layers = tuple(
            TracedLayer(name, layer.num_experts, size)
            for (name, layer), size in zip(layers.items(), sizes, strict=True)
        )
        self._stream = self.path.open("w")
        self._stream.write(_FIRST + json.dumps({"layers": [asdict(one) for one in self.layers]}))
        self._stream.write("\n")
        self._hooks = [
            layer.register_forward_hook(self._hook(i)) for i, layer in enumerate(layers.values())
        ]

    def flush(self) -> None:
        """Have all that was recorded in the file."""
        self._stream.flush()

    def close(self) -> None:
        """Record no more."""
        for hook in self._hooks:
            hook.remove()
        self._stream.close()

    def _hook(self, index: int) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        def write(layer: nn.Module, inputs: tuple[Tensor, ...], _: Tensor) -> None:
            assert isinstance(layer, MoE)
            experts = layer.load.nonzero()[:, 0].tolist()
            self._stream.write(" ".join(map(str, (index, len(inputs[0]), *experts))) + "\n")

        return write


def record(model: nn.Module, path: str | Path) -> Recorder:
    """Trace a model whose experts are in memory.

    Raises:
        ExpertFileError: it has no `heterps.MoE` layers, or they are out of memory.
        OSError: the file cannot be written.
    """
    sizes = [layer.extent for layer in placed(source.layer for source in of_model(model))]
    return Recorder(moe_layers(model), sizes, path)


def read_trace(path: str | Path) -> Trace:
    """What was recorded; a line that its writer did not end is left out.

    Raises:
        TraceError: it is no trace, or damaged; names the line.
        OSError: it cannot be read.
    """
    with Path(path).open(errors="replace") as stream:
        if stream.readline() != _FIRST:
            raise TraceError(
                f"{path}: expected a trace of experts, which begins {_FIRST.strip()!r}"
            )
        layers = _layers(stream.readline(), str(path))
        calls = []
        for number, line in enumerate(stream, start=3):
            if line.endswith("\n"):
                calls.append(_call(line, layers, f"{path}:{number}"))
    return Trace(layers, tuple(calls))


def _layers(line: str, path: str) -> tuple[TracedLayer, ...]:
    try:
        layers = tuple(TracedLayer(**one) for one in json.loads(line)["layers"])
        whole = all(one.experts > 0 and one.bytes > 0 for one in layers)
    except (ValueError, TypeError, KeyError):
        whole, layers = False, ()
    if not whole or not layers:
        raise TraceError(f"{path}:2: expected layers with names, experts and bytes, got {line!r}")
    return layers


def _call(line: str, layers: Sequence[TracedLayer], where: str) -> Call:
    try:
        layer, tokens, *experts = map(int, line.split())
        most = layers[layer].experts
        fits = layer >= 0 and tokens >= 0 and all(0 <= e < most for e in experts)
    except (ValueError, IndexError):
        fits = False
    if not fits or len(set(experts)) < len(experts):
        raise TraceError(
            f"{where}: expected a layer, a number of tokens and different experts, got {line!r}"
        )
    return Call(layer, tokens, tuple(experts))
