"""The page in a real browser: nothing sticks out, light and dark differ, no script is needed."""

import json
import re
import shutil
import subprocess
import zlib
from dataclasses import replace
from functools import cache
from html import escape, unescape
from pathlib import Path

import pytest

import scheduler
from heterps.page import decision_page
from scheduler.decision.record import Decision, Measured, TrainingPoint

PLAN = Path(__file__).resolve().parents[3] / "examples/plan"
CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine")
ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")

# The page is put into a frame of the asked width, where a window cannot be so narrow.
PROBE = """<!doctype html><body style="margin:0"><iframe srcdoc="{page}"
style="border:0;width:{width}px;height:20000px"></iframe><pre id="found"></pre><script>
document.querySelector("iframe").onload = function () {{
  const page = this.contentDocument, seen = [];
  const inside = (e) => e.closest(".scroll") || e.closest(".hidden") || e.closest("thead");
  for (const e of page.querySelectorAll("details")) e.open = true;
  for (const e of page.querySelectorAll("main *")) {{
    const box = e.getBoundingClientRect();
    if (box.width && box.right > {width} + 1 && !inside(e)) seen.push(e.outerHTML.slice(0, 80));
  }}
  const block = [...page.querySelectorAll(".block")].map((e) => e.getBoundingClientRect());
  const labels = [...page.querySelectorAll(".block-text")].map((e) => e.getBoundingClientRect());
  document.getElementById("found").textContent = JSON.stringify({{
    width: page.documentElement.scrollWidth, out: seen,
    ground: getComputedStyle(page.body).backgroundColor,
    labels: labels.map((l, n) => [l.left - block[n].left, block[n].right - l.right]),
    sections: [...page.querySelectorAll("section")].map((s) => s.getBoundingClientRect().height),
  }});
}};
</script>"""


@cache
def decision() -> Decision:
    workload = scheduler.load_workload(PLAN / "workload.yaml")
    resources = scheduler.load_resources(PLAN / "resources.yaml")
    found = scheduler.plan(workload, resources, 600_000.0, method="exact")
    names = [layer.name for layer in workload.layers]
    return replace(
        found,
        pareto=scheduler.pareto_of(found, points=8, seconds=1.0),
        probabilities={name: {"cpu": 0.7, "t4": 0.2, "v100": 0.1} for name in names},
        values=dict.fromkeys(names, -0.5),
        training=tuple(TrainingPoint(n, n - 9.0, 9.0 - n) for n in range(5)),
        measured=Measured(1e6, 9.0, 2.5, 60.0, False, tuple(s.compute_s for s in found.stages)),
    )


def named(name: str) -> Decision:
    """The same with a name that has no place to break."""
    layers = tuple(
        replace(layer, name=f"{name}{number}")
        for number, layer in enumerate(decision().workload.layers)
    )
    probabilities = {
        layer.name: shares
        for layer, shares in zip(layers, decision().probabilities.values(), strict=True)
    }
    workload = replace(decision().workload, name=name, layers=layers)
    return replace(decision(), workload=workload, probabilities=probabilities, values={})


def browse(*arguments: str) -> str:
    argv = [str(CHROMIUM), *ARGUMENTS, *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=True, timeout=120).stdout


def probed(page: str, width: int, tmp_path: Path, *arguments: str) -> dict:
    path = tmp_path / "probe.html"
    path.write_text(PROBE.format(page=escape(page), width=width), encoding="utf-8")
    out = browse("--virtual-time-budget=5000", "--dump-dom", *arguments, path.as_uri())
    found = re.search(r'<pre id="found">(.*?)</pre>', out, re.S)
    assert found, "the page was loaded"
    return json.loads(unescape(found[1]))


@pytest.mark.parametrize("width", [360, 1100])
@pytest.mark.parametrize("name", ["", "a_very_long_name_that_nothing_breaks_" * 3])
def test_nothing_sticks_out(width: int, name: str, tmp_path: Path) -> None:
    page = decision_page(named(name) if name else decision())
    found = probed(page, width, tmp_path)
    assert found["out"] == []
    assert found["width"] <= width
    assert min(found["sections"]) > 60, "no section is empty"
    assert len(found["labels"]) == len(decision().stages)
    assert min(min(room) for room in found["labels"]) >= 0, "labels lie inside their blocks"


def test_dark_is_dark_and_light_is_light(tmp_path: Path) -> None:
    page = decision_page(decision())
    light = probed(page, 800, tmp_path)
    dark = probed(page, 800, tmp_path, "--blink-settings=preferredColorScheme=0")
    assert min(map(int, re.findall(r"\d+", light["ground"]))) > 230
    assert max(map(int, re.findall(r"\d+", dark["ground"]))) < 40


def test_a_picture_of_it_is_not_blank(tmp_path: Path) -> None:
    path, picture = tmp_path / "page.html", tmp_path / "page.png"
    path.write_text(decision_page(decision()), encoding="utf-8")
    browse("--window-size=800,2000", f"--screenshot={picture}", path.as_uri())
    data = picture.read_bytes()
    pixels = zlib.decompress(b"".join(chunks(data, b"IDAT")))
    assert len(set(pixels)) > 60


def chunks(png: bytes, kind: bytes) -> list[bytes]:
    """The contents of a PNG's chunks of a kind."""
    place, found = 8, []
    while place < len(png):
        length = int.from_bytes(png[place : place + 4], "big")
        if png[place + 4 : place + 8] == kind:
            found.append(png[place + 8 : place + 8 + length])
        place += 12 + length
    return found
