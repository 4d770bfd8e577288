"""Products of `nn.Linear` on a CPU: PyTorch's own BLAS, oneDNN and ours; and whole models of them.

Contestants take turns, since machines drift; the figures to read are the ratios. Packing counts: a
training changes its weights each step. Of a model, what a worker would choose is measured once and
then a step's forward and backward are timed, with and without.

    python -m bench.linear [--rounds 21] [--threads 1] [--json FILE]
"""

import argparse
import copy
import datetime
import json
import statistics
import sys
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from bench.pages import RESULTS, machine, versions, write
from workers.ops import linear, routed_linear
from workers.profiling.linear import choose, in_turns, products

# Samples of a batch, and the widths from the input to the output.
MODELS: Final = {
    "CTR-DNN": (4096, (429, 400, 400, 1)),
    "flights": (2048, (113, 64, 1)),
    "KuaiRand": (512, (351, 64, 1)),
    "wide": (1024, (1024, 1024, 1024, 1)),
    "narrow": (4096, (64, 64, 64, 1)),
}


def measure_products(rows: int, inputs: int, outputs: int, rounds: int) -> list[dict[str, Any]]:
    """Each product on each route: GFLOP/s, and the median of the rounds' ratios."""
    found: list[dict[str, Any]] = []
    for name, product in products(rows, inputs, outputs).items():
        with torch.no_grad():
            routes = {route: partial(product, route) for route in linear.available()}
            taken = in_turns(routes, rounds)
        work = 2e-9 * rows * inputs * outputs
        ratios = {
            route: statistics.median(
                plain / own for plain, own in zip(taken[linear.TORCH], seconds, strict=True)
            )
            for route, seconds in taken.items()
        }
        found.append(
            {
                "product": name,
                "rows": rows,
                "inputs": inputs,
                "outputs": outputs,
                "gflop_per_s": {r: work / statistics.median(s) for r, s in taken.items()},
                "ratio": ratios,
            }
        )
        rates = ", ".join(
            f"{route} {work / statistics.median(seconds):.1f}" for route, seconds in taken.items()
        )
        print(
            f"  {rows} x {inputs} x {outputs} {name:11}: {rates} GFLOP/s, "
            f"ratio {max(ratios[r] for r in ratios if r != linear.TORCH):.2f}",
            flush=True,
        )
    return found


def measure_model(rows: int, widths: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """A step's forward and backward of a perceptron, with and without routes."""
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    plain = nn.Sequential(*layers[:-1])
    seen = {linear.Shape(rows, inputs, outputs) for inputs, outputs in pairwise(widths)}
    chosen = choose("cpu", [seen], lambda text: None)
    routed = copy.deepcopy(plain)
    routed_linear.route(routed, linear.Routes(chosen))
    given = torch.randn(rows, widths[0], requires_grad=True)

    def step(model: nn.Module) -> None:
        model.zero_grad(set_to_none=True)
        given.grad = None
        model(given).sum().backward()

    taken = in_turns({"torch": partial(step, plain), "routed": partial(step, routed)}, rounds)
    ratio = statistics.median(
        one / other for one, other in zip(taken["torch"], taken["routed"], strict=True)
    )
    medians = {name: statistics.median(seconds) for name, seconds in taken.items()}
    print(
        f"  a step: {medians['torch'] * 1e3:.2f} ms, routed {medians['routed'] * 1e3:.2f} ms, "
        f"ratio {ratio:.2f}",
        flush=True,
    )
    return {"seconds": medians, "ratio": ratio}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, nargs="+", default=[1])
    parser.add_argument("--json", type=Path, default=RESULTS / "linear.json")
    options = parser.parse_args()
    torch.manual_seed(0)
    runs = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        for name, (rows, widths) in MODELS.items():
            print(f"{name}, {threads} thread{'s' if threads > 1 else ''}", flush=True)
            sizes = dict.fromkeys(pairwise(widths))
            products = [
                one
                for inputs, outputs in sizes
                for one in measure_products(rows, inputs, outputs, options.rounds)
            ]
            model = measure_model(rows, widths, options.rounds)
            runs.append({"model": name, "threads": threads, "products": products, "step": model})
    result = {
        "benchmark": "linear",
        "date": datetime.date.today().isoformat(),
        "machine": machine() | {"capability": torch.backends.cpu.get_cpu_capability()},
        "versions": versions("torch"),
        "rounds": options.rounds,
        "runs": runs,
    }
    write(options.json, json.dumps(result, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
