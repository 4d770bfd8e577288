"""How good and how fast planning is: gaps to the bound, rivals, published models, growth.

    python -m bench.scheduler                         # all parts, for hours; then the page
    python -m bench.scheduler --only unseen,paper     # some; the others' results are kept
    python -m bench.scheduler --quick                 # a look at everything, in minutes

Parts are unseen (gap, feasibility and time of ppo on problems it was not trained on), flushed (the
same at staleness 0), rivals (every other method at the same evaluations, and at 100 times the
time), paper (the four published models), scaling (time against layers and types) and finetune. A
part that was interrupted goes on where it was, unless `--fresh`. Results go to
bench/results/scheduler.json, tables and plots into docs/; of `--quick` both go to runs/bench/.
"""

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from bench.pages import DOCS, QUICK, RESULTS
from bench.scheduler.parts import PARTS, Options, names
from bench.scheduler.report import write_page
from bench.scheduler.store import Store


def main() -> int:
    arguments = _parse()
    quick = arguments.quick
    store = Store.open(arguments.json or (QUICK if quick else RESULTS) / "scheduler.json")
    options = Options(
        store,
        seed=arguments.seed,
        resume=not arguments.fresh,
        say=lambda text: print(text, flush=True),
    )
    if quick:
        options = Options(
            store,
            count=24,
            flushed_problems=12,
            seed=arguments.seed,
            rival_problems=6,
            timed_problems=1,
            finetuned_problems=2,
            finetune_s=2.0,
            largest=(200, 8),
            layers=(5, 16, 64),
            types=(2, 8),
            resume=not arguments.fresh,
            say=options.say,
        )
    if arguments.methods:
        options.methods = tuple(arguments.methods.split(","))
    if arguments.budgets:
        options.budgets = tuple(arguments.budgets.split(","))
    if arguments.count:
        options.count = options.flushed_problems = arguments.count
    for part in names([name for name in arguments.only.split(",") if name]):
        PARTS[part](options)
    if not arguments.no_page:
        print(f"wrote {write_page(store, QUICK if quick else DOCS)}")
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help=f"parts: {', '.join(PARTS)}; none: all")
    parser.add_argument("--quick", action="store_true", help="few problems, into runs/bench/")
    parser.add_argument("--fresh", action="store_true", help="repeat what is there already")
    parser.add_argument("--methods", default="", help="methods of rivals, paper and scaling")
    parser.add_argument("--budgets", default="", help="of rivals: evaluations, time; none: both")
    parser.add_argument("--count", type=int, default=0, help="unseen problems, 400")
    parser.add_argument("--seed", type=int, default=1, help="of the unseen problems")
    parser.add_argument("--json", type=Path, default=None, help="the results file")
    parser.add_argument("--no-page", action="store_true", help="leave docs/ as it is")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
