"""The page about the parameter-server benchmark, made whole from its results."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.pages import measured_on, table, write
from bench.ps.plots import growth_picture, rates_picture
from bench.ps.roster import CEILING, ENTRIES, OURS, TLS_CEILING

_OPS = {"pull": "Pull", "push": "Push", "both": "Pull, then push"}
_HEAD = """# How fast and how small the parameter server is

Made by `python -m bench.ps` from `bench/results/ps.json`; do not edit. {date}; {machine}.

A batch is {samples:,} samples of 26 slots, {ids:,} ids: Zipf's law with exponent {exponent} over
{keys_a_slot:,} ids a slot, the slot in the key's high bits; {zipf:,.0f} of them distinct. Beside
it stand batches of {ids:,} distinct keys drawn evenly from the table, which holds {table_rows:,}
rows. Exact Adagrad unless it says otherwise. One client process, one or two shard processes, all
on this machine. *Rows* are the ids of a batch, repeated ones included: what a model asks for.

All peers are up at once and take turns, a fraction of a second each, {rounds} rounds with another
one first every time. Rates are medians of the rounds; *×* is the median of the rounds' ratios of
our rate over the peer's: above 1, we are faster. Before that each peer pushed three batches
and was compared with NumPy's rows. A peer may send repeated ids once or as they come; what was
faster for it at its warm-up was timed. Static peers get row numbers in place of keys, for free.
"""
_LEFT_OUT = """## What is measured of each

{texts}
The figures are of one machine with clients and shards on the same cores: they say what a call
costs, not what a network adds. One client does not show how shards serve many.
"""


def write_page(path: Path, docs: Path) -> Path:
    """Write `ps_benchmark.md` and its pictures into `docs` from a results file; the page."""
    found = json.loads(path.read_text())
    images = docs / "img"
    rates_picture(found, images / "ps_rates.svg")
    parts = [_head(found), _targets(found), _peers(found), _rates(found)]
    parts += ["![Rows a second by peer](img/ps_rates.svg)\n", _costs(found)]
    if any(line["points"] for line in found["growth"]):
        growth_picture(found, images / "ps_growth.svg")
        parts += [_growth(found), "![Cost and memory by table size](img/ps_growth.svg)\n"]
    parts += [_memory(found), _left_out(found)]
    return write(docs / "ps_benchmark.md", "\n".join(part for part in parts if part))


def tables(path: Path) -> str:
    """The tables as text, for a terminal."""
    found = json.loads(path.read_text())
    parts = [_rates(found), _costs(found), _growth(found), _memory(found), _peers(found)]
    return "\n".join(part for part in [*parts, _targets(found)] if part)


def _head(found: dict[str, Any]) -> str:
    versions = {k: v for peer in found["peers"].values() for k, v in peer["versions"].items()}
    text = measured_on(found["machine"], versions)
    return _HEAD.format(
        date=found["date"], machine=text, zipf=found["distinct"]["zipf"], **found["settings"]
    )


def _targets(found: dict[str, Any]) -> str:
    places = _places(found["targets"])
    named: dict[str, dict[tuple[int, int], dict[str, Any]]] = {}
    for line in found["targets"]:
        key = f"{line['target']} {line['limit']}"
        named.setdefault(key, {})[line["dim"], line["shards"]] = line
    lines = [(key, *(_met(of.get(place)) for place in places)) for key, of in named.items()]
    return "## Targets\n\n" + table(("", *map(_place, places)), lines)


def _met(line: dict[str, Any] | None) -> str:
    if line is None:
        return ""
    if line["value"] is None:
        return "not run"
    if line["met"] is None:
        return f"{line['value']:.4g}, without {', '.join(line['missing'])}"
    return f"{line['value']:.4g}, {'met' if line['met'] else '**not met**'}"


def _peers(found: dict[str, Any]) -> str:
    lines = []
    for name, of in found["peers"].items():
        checks = [check for check in found["checks"] if check["peer"] == name]
        worst = max((check["error"] for check in checks), default=None)
        error = "" if worst is None else f"{worst:.0e}"
        keys = "" if name in (CEILING, TLS_CEILING) else "any" if of["dynamic"] else "row numbers"
        place = "other processes" if of["networked"] else "in process"
        lines.append((f"`{name}`", of["title"], keys, place, error, of["status"].replace("|", "/")))
    header = ("", "what", "keys", "rows are", "largest error", "status")
    return "## Peers\n\n" + table(header, lines, texts=len(header))


def _rates(found: dict[str, Any]) -> str:
    places = _places(found["measurements"])
    texts = ["## Millions of rows a second\n"]
    for workload, title in (("zipf", "ids by Zipf's law"), ("distinct", "distinct keys")):
        for op, name in _OPS.items():
            cells = _cells(found, workload, op, _rate)
            texts += [f"{name}, {title}:\n", table(("", *map(_place, places)), cells)]
    return "\n".join(texts)


def _rate(line: dict[str, Any]) -> str:
    rate = f"{line['rows_per_s'] / 1e6:.3g}"
    return rate if line["peer"] == OURS else f"{rate} (×{line['ours_over_it']:.2f})"


def _costs(found: dict[str, Any]) -> str:
    places = _places(found["measurements"])
    texts = ["## Time of a call\n", "Median / 99 % in ms, of all calls; ids by Zipf's law.\n"]
    header = ("", *map(_place, places))
    for op, name in _OPS.items():
        cells = _cells(
            found, "zipf", op, lambda x: f"{1e3 * x['p50_s']:.1f} / {1e3 * x['p99_s']:.1f}"
        )
        texts += [f"{name}:\n", table(header, cells)]
    texts += ["## CPU time\n", "Seconds for a million rows, client + shards.\n"]
    for op, name in _OPS.items():
        cells = _cells(
            found,
            "zipf",
            op,
            lambda x: f"{x['client_cpu_us_a_row']:.3f} + {x['server_cpu_us_a_row']:.3f}",
        )
        texts += [f"{name}:\n", table(header, cells)]
    return "\n".join(texts)


def _cells(found: dict[str, Any], workload: str, op: str, text: Any) -> list[list[str]]:
    mine = [x for x in found["measurements"] if (x["workload"], x["op"]) == (workload, op)]
    by_place = {(x["peer"], x["dim"], x["shards"]): x for x in mine}
    places = _places(found["measurements"])
    lines = []
    for peer in found["peers"]:
        row = [by_place.get((peer, *place)) for place in places]
        if any(row):
            lines.append([f"`{peer}`", *("–" if x is None else text(x) for x in row)])
    return lines


def _growth(found: dict[str, Any]) -> str:
    texts = [
        "## Cost of a row by size of the table\n",
        "Distinct keys are pushed to one shard until it has so many rows; then batches of distinct "
        "keys spread over all of them are pulled and pushed. Memory is what is resident after "
        "a few seconds' rest, *peak* the most until then, per row. Later figures follow "
        "a + b log10(rows), fitted from a million rows on.\n",
    ]
    lines: list[Sequence[str]] = []
    for grown in found["growth"]:
        who = f"`{grown['peer']}`", str(grown["dim"])
        for point in grown["points"]:
            costs = [f"{1e9 * point[f'{op}_s_a_row']:.0f}" for op in ("pull", "push")]
            sizes = [f"{point['bytes_a_row']:.1f}", f"{point['peak_bytes_a_row']:.1f}"]
            lines.append((*who, f"{point['rows']:,}", *costs, *sizes))
        if grown["model"]:
            pull, push = (grown["model"][op]["at"] for op in ("pull", "push"))
            for rows in pull:
                costs = [f"{pull[rows]:.0f}", f"{push[rows]:.0f}"]
                lines.append((*who, f"{float(rows):,.0f}, by the model", *costs, "", ""))
        if grown["stopped"]:
            lines.append((*who, f"stopped: {grown['stopped']}", "", "", "", ""))
    header = ("", "dim", "rows", "pull, ns", "push, ns", "bytes a row", "peak")
    return "\n".join([*texts, table(header, lines)]) if lines else ""


def _memory(found: dict[str, Any]) -> str:
    places = _places(found["fills"])
    by_place = {(x["peer"], x["dim"], x["shards"]): x["bytes"] / x["rows"] for x in found["fills"]}
    lines = []
    for peer in found["peers"]:
        row = [by_place.get((peer, *place)) for place in places]
        of = found["peers"][peer]
        if (
            of["networked"]
            and peer not in (CEILING, TLS_CEILING)
            and any(x is not None for x in row)
        ):
            lines.append([f"`{peer}`", *("–" if x is None else f"{x:.0f}" for x in row)])
    text = (
        f"Growth of the shards' resident memory over {found['settings']['table_rows']:,} rows, "
        "bytes a row, after a few seconds' rest, with what is left of the buffers of the pushes "
        "that brought them. A static array would have 8 bytes times the dim.\n"
    )
    return "\n".join(["## Memory\n", text, table(("", *map(_place, places)), lines)])


def _left_out(found: dict[str, Any]) -> str:
    folder = Path(__file__).parent / "peers"
    texts = []
    for entry in ENTRIES:
        if entry.name in found["peers"]:
            source = (folder / f"{entry.module}.py").read_text()
            texts.append(f"`{entry.name}`: {source.split(chr(34) * 3)[1].strip()}\n")
    return _LEFT_OUT.format(texts="\n".join(texts))


def _places(lines: Iterable[dict[str, Any]]) -> list[tuple[int, int]]:
    return sorted({(line["dim"], line["shards"]) for line in lines})


def _place(place: tuple[int, int]) -> str:
    return f"dim {place[0]}, {place[1]} shard{'s' if place[1] > 1 else ''}"
