"""Build, test, train with and measure the CUDA ops, in one go: `python -m bench.gpu`.

Four stages, each a process of its own, so that one that fails leaves the others their results:

    build   CUTLASS's headers are fetched and the native ops installed with their kernels
    train   the flights job and a language model with experts, a few hundred steps on a GPU worker
    moe     shapes A to E beside Liger, grouped_mm, FBGEMM and the bmm bound (bench.moe)
    test    the tests of the ops and those of training on a GPU; those of the ops once more under
            compute-sanitizer, where that is installed

Writes bench/results/gpu.json and docs/gpu_benchmark.md after each stage. With --emulated all of
them run where there is no GPU: on the kernels that g++ builds for a CPU (tests/cuda/emulate), on
small shapes. The JSON has the same form, says so, and lies with its page below runs/bench/: its
times mean nothing.
"""

import argparse
import json
import sys
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

from bench.gpu import report, stages
from bench.pages import DOCS, QUICK, RESULTS, machine, versions, write

STAGES = ("build", "train", "moe", "test")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--emulated", action="store_true", help="without a GPU")
    parser.add_argument("--stages", default=",".join(STAGES), help="names, with commas between")
    parser.add_argument("--into", type=Path, help="write gpu.json and its page there")
    parser.add_argument(
        "--limit", type=float, default=stages.LIMIT_S, help="seconds of each part of a stage"
    )
    parser.add_argument("--turns", type=int, help="of each contestant; what bench.moe takes")
    parser.add_argument("--shapes", help="of bench.moe; all unless given")
    options = parser.parse_args()
    unknown = set(options.stages.split(",")) - set(STAGES)
    if unknown:
        parser.error(
            f"--stages: {', '.join(sorted(unknown))}: expected some of {', '.join(STAGES)}"
        )
    missing = [] if options.emulated else stages.missing()
    if missing:
        needs = "".join(f"\n  - {each}" for each in missing)
        parser.error(
            f"what this needs and is not here:{needs}\n--emulated runs every stage without"
        )
    place = stages.Place(options.emulated, options.limit)
    of_moe = [f"--turns={options.turns}"] if options.turns else []
    of_moe += [f"--shapes={options.shapes}"] if options.shapes else []
    run: dict[str, Callable[[], dict[str, Any]]] = {
        "build": lambda: stages.build(place),
        "train": lambda: stages.train(place),
        "moe": lambda: stages.moe(place, *of_moe),
        "test": lambda: stages.test(place),
    }
    results: dict[str, dict[str, Any]] = {}
    result = {
        "emulated": options.emulated,
        "device": "emulated, by a CPU" if options.emulated else stages.gpu_name(),
        "machine": machine(),
        "date": date.today().isoformat(),
        "versions": versions(
            "torch", "triton", "liger-kernel", "fbgemm-gpu-genai", "nvidia-cutlass"
        ),
        "stages": results,
    }
    results_in = options.into or (QUICK if options.emulated else RESULTS)
    for name in options.stages.split(","):
        print(f"{name} ...", flush=True)
        results[name] = run[name]()
        print(f"{name}: {results[name]['status']}, {results[name]['seconds']:.0f} s", flush=True)
        write(results_in / "gpu.json", json.dumps(result, indent=1) + "\n")
        page = report.write_page(result, options.into or (QUICK if options.emulated else DOCS))
    print(f"{results_in / 'gpu.json'}\n{page}")
    return int(any(stage["status"] != "passed" for stage in results.values()))


if __name__ == "__main__":
    sys.exit(main())
