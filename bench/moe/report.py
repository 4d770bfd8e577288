"""The page about the mixture of experts, made whole from its results."""

from pathlib import Path
from typing import Any

from bench.pages import named, table, table_row, write

_SHAPE = ("T", "H", "I", "E", "k")
HEADER = (
    *("shape", "routing", "contestant"),
    *("forward ms", "TFLOP/s", "times loop", "of bound"),
    *("both ms", "TFLOP/s", "times loop", "of bound", "peak MiB"),
)
_PAGE = """# Mixture of experts, measured

`make bench-moe` writes this page and `bench/results/moe.json`. Here:
{device}, {dtype}, {turns} turns, {clock} time, {versions},
{date}. Each contestant's output and gradients were compared with a float64
loop before it was timed. Router and un-permutation are inside the timing. *Times loop*
is the speed relative to the expert loop, *of bound* relative to plain `bmm` of equal
size; both are medians of the ratios inside a turn, so that what else ran on the machine
counts less. *both* is forward and backward. On a CPU small shapes have more turns, as many as
3 seconds hold.

On a CPU the shapes are those of the GPU with T / 32, H / 8, I / 8 and at most 64
experts: the full ones would take minutes a pass. What a GPU gave stands
[elsewhere](gpus.md#what-one-h200-has-shown). With one, `make bench-moe` runs the full shapes, and
Liger-Kernel (`liger-kernel`) and FBGEMM GenAI (`fbgemm-gpu-genai`) where they are installed.

{shapes}{left_out}
{rows}"""


def lines(rows: list[dict[str, Any]]) -> str:
    """Rows of the table, without its header."""
    return "".join(table_row(cells(row)) for row in rows)


def write_page(result: dict[str, Any], docs: Path) -> Path:
    """Write `moe_benchmark.md` into `docs`; the page's path."""
    shapes = [(shape["name"], *(str(shape[key]) for key in _SHAPE)) for shape in result["shapes"]]
    left_out = ", ".join(result["left_out"])
    page = _PAGE.format_map(
        {
            **result,
            "versions": named(result["versions"]),
            "shapes": table(("shape", *_SHAPE), shapes),
            "left_out": f"\nLeft out of this run: {left_out}.\n" if left_out else "",
            "rows": table(HEADER, map(cells, result["rows"]), texts=3),
        }
    )
    return write(docs / "moe_benchmark.md", page)


def cells(row: dict[str, Any]) -> list[str]:
    """A line of the table of HEADER."""
    cells = [row["shape"], row["routing"], row["contestant"]]
    if "skipped" in row:
        cells.append(f"skipped: {row['skipped']}")
        return cells + [""] * (len(HEADER) - len(cells))
    for key in ("forward", "both"):
        cells += [
            f"{row[f'{key}_ms']:.2f}",
            f"{row[f'{key}_tflops']:.3f}",
            f"{row[f'{key}_times_loop']:.2f}",
            f"{100 * row[f'{key}_of_bound']:.0f} %",
        ]
    peak = row.get("peak_bytes")
    return [*cells, "" if peak is None else f"{peak / 2**20:.0f}"]
