"""The page about the ops on a GPU, made whole from its results."""

from pathlib import Path
from typing import Any

from bench.moe.report import HEADER, cells
from bench.pages import measured_on, table, write

_RATES = ("samples_per_s", "predicted_samples_per_s", "plain_samples_per_s")
_PAGE = """# The ops on a GPU, measured

`make bench-gpu` writes this page and `bench/results/gpu.json`. Here: {device}; {on}; {date}.
{warning}
{stages}
## Training on a worker with a GPU

{trained}
## Mixture of experts

See [the page of a CPU](moe_benchmark.md) for what the columns are.

{moe}"""
_WARNING = """
**There was no GPU.** The kernels ran [on an emulated one](testing.md#device-code-without-a-device):
this shows that every stage runs, and its times mean nothing.
"""


def write_page(result: dict[str, Any], docs: Path) -> Path:
    """Write `gpu_benchmark.md` into `docs`; the page's path."""
    stages = result["stages"]
    lines = []
    for name, stage in stages.items():
        for part, of_it in stage.get("parts", {"": stage}).items():
            lines.append((name, part, of_it["status"], f"{of_it['seconds']:.0f}"))
    trained = [
        (
            job,
            str(part.get("state", part["status"])),
            *(f"{part[rate]:.0f}" if rate in part else "–" for rate in _RATES),
            ", ".join(f"{key} {value:.4g}" for key, value in part.get("metrics", {}).items()),
        )
        for job, part in stages.get("train", {}).get("parts", {}).items()
    ]
    rows = stages.get("moe", {}).get("moe", {}).get("rows", [])
    page = _PAGE.format(
        device=result["device"],
        on=measured_on(result["machine"], result["versions"]),
        date=result["date"],
        warning=_WARNING if result["emulated"] else "",
        stages=table(("stage", "part", "status", "seconds"), lines, texts=3),
        trained=table(
            ("job", "state", "samples/s", "predicted", "plain PyTorch", "metrics"), trained
        ),
        moe=table(HEADER, map(cells, rows), texts=3),
    )
    return write(docs / "gpu_benchmark.md", page)
