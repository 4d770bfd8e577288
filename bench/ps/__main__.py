"""How fast and how small the parameter server is, beside others in the same run.

    python -m bench.ps                      # everything that is installed, then the page
    python -m bench.ps --install-peers      # first: those of others, into --peers-dir
    python -m bench.ps --quick              # a look at it in a minute, into runs/bench/

Batches are 4,096 samples of 26 slots, 106,496 ids by Zipf's law; one client process, one or two
shard processes on loopback. Peers take turns in every round, because machines drift; the figure
to read is the median of the rounds' ratios. A peer that is not installed or fails is reported as
not run. Results go to bench/results/ps.json, tables into docs/ps_benchmark.md; of `--quick` both go
to runs/bench/.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from bench.answering import PeerError
from bench.pages import DOCS, QUICK, RESULTS
from bench.ps.batches import Shape
from bench.ps.report import tables, write_page
from bench.ps.roster import DEFAULT_DIR, chosen, install
from bench.ps.runs import Options, Results, run
from bench.ps.store import save


def main() -> int:
    arguments = _parse()
    if arguments.install_peers:
        return 0 if install(arguments.peers_dir, _say) else 1
    quick = arguments.quick
    path = arguments.json or (QUICK if quick else RESULTS) / "ps.json"
    options = _options(arguments)

    def keep(results: Results) -> None:
        save(path, results, options)

    try:
        run(options, keep)
    except PeerError as error:
        print(f"bench.ps: {error}", file=sys.stderr)
        return 1
    print(tables(path))
    if not arguments.no_page:
        print(f"wrote {write_page(path, QUICK if quick else DOCS)}")
    return 0


def _options(arguments: argparse.Namespace) -> Options:
    quick = arguments.quick
    shape = Shape(samples=512, keys_a_slot=100_000, table_rows=50_000, batches=4)
    shape = shape if quick else Shape()
    if arguments.table_rows:
        shape = replace(shape, table_rows=arguments.table_rows)
    names = arguments.peers or ("heterps,echo,torch-rpc,redis,grpc-dict,fbgemm" if quick else "")
    options = Options(shape, chosen(names), arguments.peers_dir, say=_say)
    if quick:
        options.dims, options.shards = (16,), (1,)
        options.rounds, options.round_s, options.rows = 2, 0.05, 200_000
        options.growers = ("heterps",)
    if arguments.dims:
        options.dims = tuple(int(dim) for dim in arguments.dims.split(","))
    if arguments.shards:
        options.shards = tuple(int(shards) for shards in arguments.shards.split(","))
    options.rounds = arguments.rounds or options.rounds
    options.rows = arguments.rows or options.rows
    return options


def _say(text: str) -> None:
    print(text, flush=True)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="small and short, into runs/bench/")
    parser.add_argument("--peers", default="", help="names, comma-separated; none: all")
    parser.add_argument("--dims", default="", help="floats a row: 16,64")
    parser.add_argument("--shards", default="", help="shard processes: 1,2")
    parser.add_argument("--rounds", type=int, default=0, help="turns of every peer, 10")
    parser.add_argument("--rows", type=int, default=0, help="how far a table grows, 10,000,000")
    parser.add_argument(
        "--table-rows", type=int, default=0, help="rows held while timed, 1,000,000"
    )
    parser.add_argument("--json", type=Path, default=None, help="the results file")
    parser.add_argument("--no-page", action="store_true", help="leave docs/ as it is")
    parser.add_argument("--peers-dir", type=Path, default=DEFAULT_DIR, help="of other systems")
    parser.add_argument("--install-peers", action="store_true", help="install them and end")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
