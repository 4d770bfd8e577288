"""Measure the mixture-of-experts layer beside other ways to run one: `python -m bench.moe`.

Every contestant gets the same tokens, weights and routing; router and un-permutation are inside
the timing. Outputs and gradients are compared with a loop in float64 before anything is timed.
Contestants take turns, and what is reported are medians, and medians of the ratios inside a turn.
Writes bench/results/moe.json and docs/moe_benchmark.md.
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.moe import contestants, report
from bench.pages import DOCS, RESULTS, machine, versions, write


@dataclass(frozen=True, slots=True)
class Shape:
    """T tokens, H width, I width of an expert, E experts, k choices, or groups of prototypes."""

    name: str
    T: int
    H: int
    I: int  # noqa: E741 (the name in every paper)
    E: int
    k: int
    prototypes: bool = False

    def flops(self, backward: bool) -> float:
        """Of a SwiGLU layer without its router."""
        return (18 if backward else 6) * self.T * self.k * self.H * self.I


GPU_SHAPES = [
    *(Shape(f"A{tokens}", tokens, 2048, 768, 128, 8) for tokens in (4096, 8192, 32768)),
    Shape("B", 32768, 4096, 1024, 128, 8),
    Shape("C", 8192, 4096, 14336, 8, 2),
    Shape("D", 8192, 1536, 256, 128, 8),
    *(Shape(f"E{z}", 8192, 1024, 4096, 64, z, prototypes=True) for z in (1, 2, 4)),
]
# The same with T / 32, H / 8, I / 8 and at most 64 experts.
CPU_SHAPES = [
    *(Shape(f"A{tokens}/32", tokens // 32, 256, 96, 64, 8) for tokens in (4096, 8192, 32768)),
    Shape("B/32", 1024, 512, 128, 64, 8),
    Shape("C/32", 256, 512, 1792, 8, 2),
    Shape("D/32", 256, 192, 32, 64, 8),
    *(Shape(f"E{z}/32", 256, 128, 512, 64, z, prototypes=True) for z in (1, 2, 4)),
]
# On an emulated GPU, where each thread is a fiber: the same names and E > k, all else tiny.
EMULATED_SHAPES = [
    Shape(f"{shape.name} emulated", 6, 16, 8, 8, min(shape.k, 4), shape.prototypes)
    for shape in GPU_SHAPES
]
ROUTINGS = ("uniform", "skewed", "partly empty")


def bias_of(routing: str, experts: int) -> Tensor:
    """What is added to the router's logits, so that it routes in that way."""
    bias = torch.zeros(experts)
    if routing == "skewed":  # FasterMoE saw 4 of 16 experts take 20 % each
        bias[::4] = 2.0
    elif routing == "partly empty":
        bias[1::4] = -1e9
    return bias


def problem_of(shape: Shape, routing: str, dtype: torch.dtype, device: str) -> contestants.Problem:
    """Weights, and tokens of several batches so that no two turns route alike."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device)

    def random(*size: int, scale: float = 1.0) -> Tensor:
        return (normal(*size) * scale).to(dtype)

    return contestants.Problem(
        batches=[random(shape.T, shape.H) for _ in range(3)],
        direction=random(shape.T, shape.H),
        router=normal(shape.E, shape.H) * shape.H**-0.5,
        bias=bias_of(routing, shape.E).to(device),
        w1=random(shape.E, shape.H, 2 * shape.I, scale=shape.H**-0.5),
        w2=random(shape.E, shape.I, shape.H, scale=shape.I**-0.5),
        k=shape.k,
        prototypes=shape.prototypes,
    )


def difference(mine: Tensor, exact: Tensor) -> float:
    """1 - 2 <a, b> / (<a, a> + <b, b>), as DeepGEMM's tests have it; 0 when equal."""
    a, b = mine.double().flatten(), exact.double().flatten()
    total = (a @ a + b @ b).item()
    return 0.0 if total == 0 else 1 - 2 * (a @ b).item() / total


def worst_difference(run: contestants.Run, exact: list[Tensor]) -> float:
    """Over output and gradients of one batch."""
    pairs = zip(run.check(0), exact, strict=True)
    return max(difference(mine, theirs) for mine, theirs in pairs)


def seconds_of(work: Callable[[], object], clock: str) -> float:
    """Wall time of one call, the GPU's own time, or the time that this process had a CPU."""
    if clock == "gpu":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3
    now = time.process_time if clock == "cpu" else time.perf_counter
    start = now()
    work()
    return now() - start


def measure(
    runs: dict[str, contestants.Run], turns: int, backward: bool, clock: str, least_s: float
) -> dict[str, list[float]]:
    """Seconds of every turn, the contestants one after the other in each; more turns in `least_s`.

    Small shapes take so little time that a few turns tell more of the machine than of them.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    end = time.monotonic() + least_s
    turn = -3
    while (turn := turn + 1) < turns or time.monotonic() < end:  # two to warm up
        for name, run in runs.items():
            work = run.both if backward else run.forward
            taken = seconds_of(lambda work=work, turn=turn: work(turn % 3), clock)
            if turn >= 0:
                times[name].append(taken)
    return times


def peak_bytes(run: contestants.Run, device: str) -> int | None:
    """Of a forward and backward, above what lay there before; on GPUs only."""
    if device != "cuda":
        return None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run.both(0)
    return torch.cuda.max_memory_allocated() - before


def rows_of(
    shape: Shape,
    routing: str,
    dtype: torch.dtype,
    device: str,
    turns: int,
    clock: str,
    least_s: float = 0.0,
) -> list[dict[str, Any]]:
    """The results of all contestants on one shape and routing."""
    problem = problem_of(shape, routing, dtype, device)
    exact = contestants.Exact(problem).check(0)
    runs, rows = {}, []
    limit = 1e-4 if dtype in (torch.bfloat16, torch.float16) else 1e-9
    for name, make in contestants.ALL.items():
        row: dict[str, Any] = {"shape": shape.name, "routing": routing, "contestant": name}
        try:
            run = make(problem)
            if not isinstance(run, contestants.Bound):
                row["difference"] = worst_difference(run, exact)
                if not row["difference"] < limit:
                    row["skipped"] = f"differs by {row['difference']:.1e}"
        except contestants.AbsentError as error:
            row["skipped"] = str(error)
        if "skipped" not in row:
            runs[name] = run
        rows.append(row)
    for backward, key in ((False, "forward"), (True, "both")):
        times = measure(runs, turns, backward, clock, least_s)
        for row in rows:
            mine = times.get(row["contestant"])
            if mine is None:
                continue
            median = statistics.median(mine)
            row[f"{key}_ms"] = median * 1e3
            row[f"{key}_tflops"] = shape.flops(backward) / median / 1e12
            for other, name in (("loop", "times_loop"), ("bmm bound", "of_bound")):
                ratios = [b / a for a, b in zip(mine, times[other], strict=True)]
                row[f"{key}_{name}"] = statistics.median(ratios)
    for row in rows:
        if row["contestant"] in runs:
            row["peak_bytes"] = peak_bytes(runs[row["contestant"]], device)
    return rows


def device_name(device: str) -> str:
    """Of the GPU, or of the CPU with its threads."""
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"{machine()['processor']}, {torch.get_num_threads()} threads"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default=None, help="bfloat16 on a GPU, float32 on a CPU")
    parser.add_argument(
        "--turns", type=int, default=None, help="50 on a GPU, 9 on a CPU and 3 seconds of them"
    )
    parser.add_argument("--threads", type=int, default=None, help="of the CPU; torch's default")
    parser.add_argument(
        "--cpu-time", action="store_true", help="time on the CPU, where others share the machine"
    )
    parser.add_argument("--shapes", default="", help="names, with commas between; all unless given")
    parser.add_argument("--into", type=Path, help="write moe.json and the page there")
    parser.add_argument(
        "--emulated", action="store_true", help="tiny shapes for kernels that bench.gpu emulates"
    )
    parser.add_argument("--no-write", action="store_true", help="print only")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    on_gpu = options.device == "cuda"
    name = options.dtype or ("bfloat16" if on_gpu or options.emulated else "float32")
    shapes = every = GPU_SHAPES if on_gpu else CPU_SHAPES
    if options.emulated:
        shapes = every = EMULATED_SHAPES
    if options.shapes:
        known = {shape.name: shape for shape in shapes}
        shapes = [known[wanted] for wanted in options.shapes.split(",")]
    turns = options.turns or (50 if on_gpu else 1 if options.emulated else 9)
    least_s = 0.0 if on_gpu or options.turns or options.emulated else 3.0
    clock = "gpu" if on_gpu else "cpu" if options.cpu_time else "wall"
    rows: list[dict[str, Any]] = []
    result: dict[str, Any] = {
        "device": device_name(options.device),
        "dtype": name,
        "turns": turns,
        "clock": clock,
        "date": date.today().isoformat(),
        "emulated": options.emulated,
        "versions": versions("torch"),
        "rows": rows,
    }
    for number, shape in enumerate(shapes, 1):
        for routing in ROUTINGS:
            if on_gpu:
                torch.cuda.empty_cache()
            new = rows_of(
                shape, routing, getattr(torch, name), options.device, turns, clock, least_s
            )
            rows += new
            print(report.lines(new), end="", flush=True)
        measured = shapes[:number]
        result["shapes"] = [asdict(shape) for shape in measured]
        result["left_out"] = [shape.name for shape in every if shape not in measured]
        if not options.no_write:
            write((options.into or RESULTS) / "moe.json", json.dumps(result, indent=1) + "\n")
            report.write_page(result, options.into or DOCS)


if __name__ == "__main__":
    main()
