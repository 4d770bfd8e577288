"""What all benchmarks share: files, what they ran on, tables and pictures of pages."""

import os
import platform
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

from chassis.files import replace_file

ROOT: Final = Path(__file__).resolve().parents[1]
RESULTS: Final = ROOT / "bench" / "results"
DOCS: Final = ROOT / "docs"
QUICK: Final = ROOT / "runs" / "bench"  # results and pages of a quick look
_STYLE: Final[dict[Any, Any]] = {
    "svg.hashsalt": "heterps",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.dpi": 100,
}


def write(path: Path, text: str) -> Path:
    """Write a results file or a page in one step, its folder too; the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, text)
    return path


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.is_file():
        names = [x for x in described.read_text().splitlines() if x.startswith("model name")]
        model = names[0].partition(":")[2].strip() if names else model
    return {"processor": model, "architecture": platform.machine(), "cores": os.cpu_count()}


def versions(*packages: str) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for name in packages:
        try:
            found[name] = version(name)
        except ModuleNotFoundError:
            continue
    return found


def measured_on(of: Mapping[str, Any], used: Mapping[str, str]) -> str:
    """A machine and versions as a page's head names them."""
    return f"{of['processor']}, {of['cores']} cores; {named(used)}"


def named(used: Mapping[str, str]) -> str:
    """Versions in a line."""
    return ", ".join(f"{name} {number}" for name, number in used.items())


def table(header: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table in Markdown; the first `texts` columns are aligned to the left, figures right."""
    rule = ["---"] * texts + ["--:"] * (len(header) - texts)
    return "".join(map(table_row, [header, rule, *lines]))


def table_row(cells: Sequence[str]) -> str:
    """One line of a table."""
    return "| " + " | ".join(cells) + " |\n"


def picture(
    draw: Callable[[Sequence[Any]], None],
    path: Path,
    panels: int,
    inches: tuple[float, float],
    legend_outside: bool = False,
) -> None:
    """Let `draw` fill panels beside each other; an SVG, the same for the same results."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    path.parent.mkdir(parents=True, exist_ok=True)
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=inches)
        FigureCanvasSVG(figure)
        draw(list(figure.subplots(1, panels, squeeze=False).flat))
        figure.tight_layout()
        box = "tight" if legend_outside else None
        figure.savefig(path, metadata={"Date": None}, bbox_inches=box)
