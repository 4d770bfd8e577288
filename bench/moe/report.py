"""The tables of bench.moe."""

from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[2] / "docs" / "moe_benchmark.md"


def lines(rows: list[dict[str, Any]]) -> str:
    """Rows of a table in Markdown."""
    return "\n".join(_line(row) for row in rows)


def _line(row: dict[str, Any]) -> str:
    cells = [row["shape"], row["routing"], row["contestant"]]
    if "skipped" in row:
        return f"| {' | '.join(cells)} | skipped: {row['skipped']} |||||||||"
    for key in ("forward", "both"):
        cells += [
            f"{row[f'{key}_ms']:.2f}",
            f"{row[f'{key}_tflops']:.3f}",
            f"{row[f'{key}_times_loop']:.2f}",
            f"{100 * row[f'{key}_of_bound']:.0f} %",
        ]
    peak = row.get("peak_bytes")
    cells.append("" if peak is None else f"{peak / 2**20:.0f}")
    return f"| {' | '.join(cells)} |"


def write(result: dict[str, Any]) -> None:
    """docs/moe_benchmark.md."""
    head = (
        "| shape | routing | contestant | forward ms | TFLOP/s | times loop | of bound "
        "| both ms | TFLOP/s | times loop | of bound | peak MiB |\n"
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|"
    )
    shapes = "\n".join(
        f"| {s['name']} | {s['T']} | {s['H']} | {s['I']} | {s['E']} | {s['k']} |"
        for s in result["shapes"]
    )
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    left_out = ", ".join(result["left_out"])
    note = f"\nLeft out of this run: {left_out}.\n" if left_out else ""
    PAGE.write_text(
        f"""# Mixture of experts, measured

`make bench-moe` writes this page and `bench/results/moe.json`. Here:
{result["device"]}, {result["dtype"]}, {result["turns"]} turns, {result["clock"]} time, {versions},
{result["date"]}. Each contestant's output and gradients were compared with a float64
loop before it was timed. Router and un-permutation are inside the timing. *Times loop*
is the speed relative to the expert loop, *of bound* relative to plain `bmm` of equal
size; both are medians of the ratios inside a turn, so that what else ran on the machine
counts less. *both* is forward and backward.

On a CPU the shapes are those of the GPU with T / 32, H / 8, I / 8 and at most 64
experts: the full ones would take minutes a pass. **The CUDA kernels have not been
measured: no GPU was at hand.** With one, `make bench-moe` runs the full shapes, and
Liger-Kernel (`liger-kernel`) and FBGEMM GenAI (`fbgemm-gpu-genai`) where they are installed.

| shape | T | H | I | E | k |
|---|--:|--:|--:|--:|--:|
{shapes}
{note}
{head}
{lines(result["rows"])}
"""
    )
