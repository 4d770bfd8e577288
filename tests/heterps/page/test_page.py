"""The page: well formed, self-contained and safe whatever a name holds, with all that there is."""

import math
from dataclasses import replace
from functools import cache
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import scheduler
from heterps.html.markup import tag
from heterps.html.palette import DARK, LIGHT, Palette
from heterps.html.parts import shortened
from heterps.html.scale import Axis
from heterps.page import decision_page, write_page
from scheduler.decision.record import Decision, Measured, ParetoPoint, Relaxation, TrainingPoint

PLAN = Path(__file__).resolve().parents[3] / "examples/plan"
_VOID = {"meta", "br", "col", "hr"}


@cache
def planned(floor: float = 600_000.0) -> Decision:
    workload = scheduler.load_workload(PLAN / "workload.yaml")
    resources = scheduler.load_resources(PLAN / "resources.yaml")
    return scheduler.plan(workload, resources, floor, method="greedy")


def full() -> Decision:
    """A decision with everything that a page can show."""
    base = planned()
    layers = [layer.name for layer in base.workload.layers]
    point = ParetoPoint(base.throughput, base.plan.price_per_hour, base.cost, base.assignment, True)
    return replace(
        base,
        pareto=(point, replace(point, throughput=1e6, cost=2 * base.cost, proven=False)),
        probabilities={name: {"cpu": 0.75, "t4": 0.25, "v100": 0.0} for name in layers},
        values=dict.fromkeys(layers, -0.5),
        training=(TrainingPoint(0, -2.0, math.inf), TrainingPoint(900, -1.0, base.cost)),
        relaxations=(Relaxation("limit.v100", 8, 11, 1e6, 20.0, 5.0),),
        measured=Measured(5e5, 8.0, 3.0, 60.0, True, tuple(s.compute_s for s in base.stages)),
        input_hash="ab" * 32,
        versions={"heterps": "1.2.3"},
        created_at=1.7e9,
    )


class Page(HTMLParser):
    """Reads a page strictly: every element is closed in turn."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.children: dict[int, list[str]] = {}
        self._places: list[int] = []
        self.feed(text)
        self.close()
        assert not self.open, "closed to the end"

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(dict(attrs)) == len(attrs), f"{name}: an attribute twice"
        if self._places:
            self.children.setdefault(self._places[-1], []).append(name)
        self.elements.append((name, dict(attrs)))
        if name not in _VOID:
            self.open.append(name)
            self._places.append(len(self.elements) - 1)

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name
        self._places.pop()

    def handle_data(self, data: str) -> None:
        self.words.append(data)

    @property
    def text(self) -> str:
        return "".join(self.words)

    def ids(self) -> list[str]:
        return [attrs["id"] or "" for _, attrs in self.elements if "id" in attrs]


def test_a_page_has_all_that_there_is() -> None:
    page = Page(decision_page(full()))
    for name in ("relax", "plan", "stages", "measured", "why", "pareto", "alternatives"):
        assert name in page.ids()
    assert {"agent", "training", "inputs"} <= set(page.ids())
    for layer in full().workload.layers:
        assert layer.name in page.text
    for reason in full().reasons:
        assert reason in page.text
    for other in full().alternatives:
        assert other.method in page.text
    assert {"limit of v100", "ab" * 32, "1.2.3", "slowest"} <= set(page.words)
    assert len(page.ids()) == len(set(page.ids()))


def test_what_is_not_there_leaves_no_empty_section() -> None:
    bare = replace(planned(), alternatives=(), reasons=(), workload=None, resources=None)
    page = Page(decision_page(bare))
    sections = [attrs["id"] for name, attrs in page.elements if name == "section"]
    assert sections == ["plan", "stages", "inputs"]


def test_an_infeasible_decision_says_why_and_draws_no_plan_where_there_is_none() -> None:
    impossible = planned(1e12)
    page = Page(decision_page(impossible))
    assert "No plan meets the demands" in page.text
    assert impossible.plan.reason in page.text
    nothing = replace(impossible, plan=replace(impossible.plan, stages=()), alternatives=())
    assert "plan" not in Page(decision_page(nothing)).ids()


def test_a_page_loads_and_runs_nothing() -> None:
    text = decision_page(full())
    page = Page(text)
    names = {name for name, _ in page.elements}
    assert not names & {"script", "link", "img", "iframe", "object", "embed", "form", "base"}
    for _, attrs in page.elements:
        assert not any(key.startswith("on") for key in attrs)
        assert not {"src", "href", "xlink:href"} & set(attrs)
    assert "@import" not in text
    assert "url(" not in text.replace("url(#arrow)", "")
    policies = [attrs["content"] for _, attrs in page.elements if "http-equiv" in attrs]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'"]


def test_every_picture_has_a_name_and_a_description() -> None:
    page = Page(decision_page(full()))
    pictures = 0
    for place, (name, attrs) in enumerate(page.elements):
        if name == "svg" and attrs.get("role") == "img":
            pictures += 1
            assert page.children[place][:2] == ["title", "desc"]
    assert pictures == 4, "lanes, curve, and two of the training"
    for place, (name, _) in enumerate(page.elements):
        if name == "table":
            assert page.children[place][0] == "caption"


texts = st.text(min_size=1, max_size=12) | st.sampled_from(
    ["<script>alert(1)</script>", "</style>", '" onload="x', "a&b<c>'d'", "]]>", "-->", "\x00\x08"]
)


@settings(max_examples=25)
@given(st.lists(texts, min_size=10, max_size=10, unique=True), texts, texts)
def test_a_name_is_never_markup(layers: list[str], title: str, reason: str) -> None:
    base = replace(full(), reasons=("because",), pin={full().workload.layers[0].name: "cpu"})
    named = replace(
        base,
        method=title,
        reasons=(f"because {reason}",),
        workload=replace(
            base.workload,
            name=title,
            layers=tuple(
                replace(layer, name=name)
                for layer, name in zip(base.workload.layers, layers, strict=True)
            ),
        ),
        probabilities=dict(zip(layers, base.probabilities.values(), strict=True)),
        values=dict.fromkeys(layers, -0.5),
        pin={layers[0]: "cpu"},
    )
    page = Page(decision_page(named))
    plain = Page(decision_page(base))
    assert [name for name, _ in page.elements] == [name for name, _ in plain.elements]
    assert [set(attrs) for _, attrs in page.elements] == [set(a) for _, a in plain.elements]


def test_attributes_are_escaped() -> None:
    made = tag("a", "<b>", title='"><script>', class_="x", hidden=True, missing=None)
    assert made == '<a title="&quot;&gt;&lt;script&gt;" class="x" hidden>&lt;b&gt;</a>'


@pytest.mark.parametrize(("layers", "types"), [(1, 1), (30, 16), (200, 8), (49, 2)])
def test_plans_of_any_size_are_drawn(layers: int, types: int) -> None:
    names = ["cpu", *(f"gpu-{n}" for n in range(1, types))]
    cost = {"parallel_compute": 0.9, "parallel_sync": 0.9, "sync_s": 0.01, "transfer_s": 0.01}
    work = {
        "name": "big",
        "reference_batch": 100,
        "samples": 1e6,
        "ps_type": "cpu",
        "ps_core_s": 0.0,
        "layers": [
            {
                "name": f"layer {n}",
                "kind": "dense",
                "cost": {names[n % types]: {"compute_s": 0.1, "memory_bytes": 1.0, **cost}},
            }
            for n in range(layers)
        ],
    }
    offer = [
        {"name": name, "price_per_hour": 1.0, "limit": 400, "memory_bytes": 1e9} for name in names
    ]
    decision = scheduler.plan(work, {"types": offer}, method="greedy")
    assert decision.feasible
    page = Page(decision_page(decision))
    blocks = [a for name, a in page.elements if name == "rect" and "block" in (a["class"] or "")]
    assert len(blocks) == len(decision.stages)


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    write_page(full(), path)
    assert path.read_text(encoding="utf-8") == decision_page(full())
    assert list(tmp_path.iterdir()) == [path]


@given(
    st.lists(st.integers(-(10**9), 10**9) | st.floats(1e-9, 1e9), min_size=1, max_size=5),
    st.booleans(),
)
def test_an_axis_holds_its_values_and_ticks(values: list[float], zero: bool) -> None:
    axis = Axis.around(values, zero)
    assert all(-1e-9 <= axis.at(value) <= 1 + 1e-9 for value in (*values, *axis.ticks))
    assert len(axis.ticks) <= 8
    assert list(axis.ticks) == sorted(set(axis.ticks))


@given(st.text(max_size=40), st.integers(3, 20))
def test_a_shortened_name_keeps_its_ends(name: str, most: int) -> None:
    short = shortened(name, most)
    assert len(short) <= most
    if len(name) <= most:
        assert short == name
    else:
        head, _, tail = short.rpartition("…")
        assert name.startswith(head)
        assert name.endswith(tail)


# Machado, Oliveira and Fernandes, IEEE TVCG 15(6), 2009, severity 1.0, on linear RGB.
VISION = {
    "normal": np.eye(3),
    "protan": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
    "deutan": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "tritan": np.array(
        [
            [1.255528, -0.076749, -0.178779],
            [-0.078411, 0.930809, 0.147602],
            [0.004733, 0.691367, 0.303900],
        ]
    ),
}


def linear(colour: str) -> np.ndarray:
    rgb = np.array([int(colour[place : place + 2], 16) for place in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    xyz = np.array(to_xyz) @ np.clip(rgb, 0, 1) / np.array([0.9505, 1.0, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


@pytest.mark.parametrize(("colours", "ground"), [(LIGHT, "#ffffff"), (DARK, "#16181d")])
@pytest.mark.parametrize("vision", VISION)
def test_types_are_told_apart_with_any_vision(
    colours: tuple[str, ...], ground: str, vision: str
) -> None:
    seen = [lab(VISION[vision] @ linear(colour)) for colour in colours]
    assert min(float(np.linalg.norm(a - b)) for a, b in combinations(seen, 2)) >= 18
    luminance = [float(linear(c) @ [0.2126, 0.7152, 0.0722]) + 0.05 for c in (*colours, ground)]
    assert all(max(one, luminance[-1]) / min(one, luminance[-1]) >= 3 for one in luminance[:-1])


def test_types_beyond_the_colours_are_striped() -> None:
    palette = Palette(f"t{n}" for n in range(16))
    assert len({palette.of(f"t{n}") for n in range(16)}) == 16
