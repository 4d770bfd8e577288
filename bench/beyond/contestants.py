"""One contestant: a process with a model larger than its memory, which runs tokens when told.

Started by `bench.beyond` inside a control group. For each turn it reads a line of JSON,
{"forwards": n}, and answers by one: seconds of each forward, a digest of the outputs, statistics.
The memory that it is given is counted from when its process is ready: with all libraries, but
without what they allocate for the model.
"""

import hashlib
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.beyond.shakespeare import EXPERTS, LAYERS, K, tell
from heterps import MoE, offload
from workers.offload.choice.trace import Trace, read_trace

WIDTH, HIDDEN = 512, 512  # an expert is 2 MiB
PLAIN = "cache, nothing read ahead"
NAMES = ("cache", PLAIN, "ring", "auto", "resident", "torch mmap", "safetensors mmap", "accelerate")
SLACK = 24 << 20  # bytes over the cap: activations, threads


class Expert(nn.Module):
    """As those that are stacked, of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(WIDTH, HIDDEN, bias=False)
        self.two = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.two(F.gelu(self.one(x)))
        return out


class Layer(nn.Module):
    """Something dense and a mixture of experts."""

    def __init__(self, modules: bool) -> None:
        super().__init__()
        self.norm, self.dense = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        expert = Expert if modules else None
        self.moe = MoE(WIDTH, EXPERTS, None if modules else HIDDEN, K, expert=expert)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.dense(self.norm(x))
        out: Tensor = x + self.moe(x)
        return out


class Big(nn.Module):
    """All layers; tokens are vectors, since what is before them is the same in all contestants."""

    def __init__(self, modules: bool = False, layers: int = LAYERS) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(modules) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def files(work: Path) -> dict[str, Path]:
    """What each kind of contestant reads its experts from."""
    return {
        "heterps": work / "experts.heterps",
        "torch mmap": work / "model.pt",
        "safetensors mmap": work / "model.safetensors",
        "accelerate": work / "accelerate",
        "dense": work / "dense.pt",
    }


def as_modules(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of a model with stacked experts as one of modules has them."""
    made = {}
    for key, one in state.items():
        layer, _, last = key.rpartition(".")
        if last in ("w1", "w2"):
            part = "one" if last == "w1" else "two"
            for e in range(EXPERTS):
                made[f"{layer}.experts.{e}.{part}.weight"] = one[e].t().contiguous()
        else:
            made[key] = one
    return made


def dense(name: str, work: Path) -> nn.Module:
    """The model of a contestant without its experts."""
    with torch.device("meta"):
        model = Big(modules=name == "accelerate").eval()
    model.load_state_dict(torch.load(files(work)["dense"]), strict=False, assign=True)
    return model


def experts(name: str, model: nn.Module, work: Path, memory: int, batch: int, known: Trace) -> Any:
    """Give it these; our handle, where it is ours."""
    at = files(work)
    if name in ("cache", PLAIN, "ring", "auto"):
        like, mode = _named(known), "cache" if name == PLAIN else name
        path, ahead = at["heterps"], name != PLAIN
        return offload(model, memory, path=path, mode=mode, batch=batch, like=like, ahead=ahead)
    if name == "resident":
        state = torch.load(at["torch mmap"])
    elif name == "torch mmap":
        state = torch.load(at["torch mmap"], mmap=True)
    elif name == "safetensors mmap":
        from safetensors.torch import load_file

        state = load_file(at["safetensors mmap"])
    else:
        _accelerate(model, at["accelerate"])
        return None
    model.load_state_dict(state, strict=False, assign=True)
    return None


def _import(name: str) -> None:
    """Load what a contestant's libraries are, before its memory is counted."""
    if name == "safetensors mmap":
        import safetensors.torch  # noqa: F401
    elif name == "accelerate":
        # Its first forward imports a hundred megabytes more.
        from accelerate.hooks import attach_align_device_hook

        tiny = nn.Sequential(nn.Linear(1, 1))
        weights = {key: one.clone() for key, one in tiny.state_dict().items()}
        attach_align_device_hook(tiny, execution_device="cpu", offload=True, weights_map=weights)
        tiny(torch.zeros(1, 1))


def _accelerate(model: nn.Module, folder: Path) -> None:
    """Its disk offload, of the experts alone: what its `disk_offload` does once the files are."""
    from accelerate.hooks import attach_align_device_hook
    from accelerate.utils import OffloadedWeightsLoader, PrefixedDataset

    loader = OffloadedWeightsLoader(save_folder=folder)
    for name, module in model.named_modules():
        if isinstance(module, MoE):
            attach_align_device_hook(
                module.experts,
                execution_device="cpu",
                offload=True,
                weights_map=PrefixedDataset(loader, f"{name}.experts."),
            )


def _named(trace: Trace) -> Trace:
    """The trace with the names and sizes of this model."""
    size = 2 * WIDTH * HIDDEN * 4
    layers = (
        replace(one, name=f"layers.{i}.moe", bytes=size) for i, one in enumerate(trace.layers)
    )
    return Trace(tuple(layers), trace.calls)


def route(model: nn.Module, trace: Trace, work: Path, batch: int, first: int) -> None:
    """Have the layers choose as was traced from token `first` on, `batch` tokens a forward."""
    guesses = torch.load(work / "shakespeare.guesses")
    told = torch.zeros(LAYERS, trace.tokens, EXPERTS, dtype=torch.bool)
    seen = [0] * LAYERS
    for call in trace.calls:
        told[call.layer, seen[call.layer], list(call.experts)] = True
        seen[call.layer] += 1
    for i, module in enumerate(m for m in model.modules() if isinstance(m, MoE)):
        whole = (trace.tokens - first) // batch * batch
        mine = slice(first, first + whole)
        likely = guesses[i, mine].view(-1, batch, EXPERTS).sum(dim=1)
        tell(module, told[i, mine].view(-1, batch, EXPERTS), likely)


def inputs(number: int, batch: int) -> Tensor:
    """Of a forward."""
    return torch.randn(batch, WIDTH, generator=torch.Generator().manual_seed(number))


def main() -> int:
    work, name, memory, batch, first, group = sys.argv[1:]
    folder = None if group == "-" else Path(group)
    torch.set_grad_enabled(False)
    known, model = read_trace(Path(work) / "shakespeare.trace"), dense(name, Path(work))
    route(model, known, Path(work), int(batch), int(first))
    _import(name)
    base = _number(folder, "memory.usage_in_bytes")
    if folder is not None and name != "resident" and int(memory) > 0 and not _unlimited(folder):
        (folder / "memory.limit_in_bytes").write_text(str(base + int(memory) + SLACK))
    if folder is not None:
        (folder / "memory.max_usage_in_bytes").write_text("0")
    handle = experts(name, model, Path(work), int(memory), int(batch), known)
    expected = [asdict(one) for one in handle.expected] if handle else []
    _say({"ready": name, "mode": handle.mode if handle else name, "expected": expected})
    number = 0
    with handle or nullcontext():
        for line in sys.stdin:
            asked = json.loads(line)
            before = replace(handle.stats) if handle else None
            digest, seconds = hashlib.sha256(), []
            for _ in range(asked["forwards"]):
                x = inputs(number, int(batch))
                begin = time.perf_counter()
                out = model(x)
                seconds.append(time.perf_counter() - begin)
                digest.update(out.numpy().tobytes())
                number += 1
            told: dict[str, Any] = {"seconds": seconds, "digest": digest.hexdigest()}
            if handle and before is not None:
                told["stats"] = asdict(handle.stats - before)
            told["peak"] = _number(folder, "memory.max_usage_in_bytes") - base
            _say(told)
    return 0


def _unlimited(folder: Path) -> bool:
    return folder.name.endswith("-unlimited")


def _number(folder: Path | None, name: str) -> int:
    return 0 if folder is None else int((folder / name).read_text())


def _say(told: dict[str, Any]) -> None:
    print(json.dumps(told), flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
