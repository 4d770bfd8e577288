"""The process that profiles a job for a node: `python -m workers.profiling --request FILE`."""

import argparse
import json
import os
import signal
import sys
import traceback
from pathlib import Path
from types import FrameType

import torch

from chassis import process
from chassis.exits import TOLD, exit_code_of
from chassis.files import replace_file
from protos.decision_pb2 import Workload
from protos.node_pb2 import ProfileRequest
from workers.model.code.brought import code_root, enter
from workers.profiling.look import look
from workers.stage.report.failure import end_reason_of, told


class _Ended(SystemExit):
    """This process was told to end."""


def main(argv: list[str] | None = None) -> int:
    """Write the `Workload` of a `ProfileRequest`; the exit code tells how it failed."""
    parser = argparse.ArgumentParser(prog="workers.profiling", description=__doc__)
    parser.add_argument("--request", required=True, type=Path, help="serialized ProfileRequest")
    parser.add_argument("--result", required=True, type=Path, help="where the Workload goes")
    parser.add_argument("--modules", type=Path, help="where the files of modules go, as JSON")
    parser.add_argument("--type", required=True, help="the resource type of this node")
    parser.add_argument("--units", type=int, default=1, help="workers that may run at once")
    parser.add_argument("--batch", type=int, default=0, help="reference batch; 0: the job's")
    parser.add_argument(
        "--bytes-per-s", type=float, default=0.0, help="of the network; 0: what loopback does here"
    )
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args(argv)
    process.setup_logging("profile")
    process.lifeline()
    signal.signal(signal.SIGTERM, _end)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    request = ProfileRequest.FromString(options.request.read_bytes())
    enter(request.job)
    try:
        workload = look(request.job) if request.unmeasured else _measure(request, options)
    except _Ended:
        raise
    except (Exception, SystemExit) as error:  # the job's code may end the process, or try to
        plain = isinstance(error, ValueError)  # those speak of the user's files, not of ours
        if not plain:
            traceback.print_exc()
        print(told(error), file=sys.stderr, flush=True)
        code = exit_code_of(end_reason_of(error, request.job))
        return TOLD if plain and code == 1 else code
    if options.modules:
        replace_file(options.modules, json.dumps(_imported(request)).encode())
    replace_file(options.result, workload.SerializeToString())
    return 0


def _imported(request: ProfileRequest) -> list[str]:
    """The files of all modules that are imported, but for those of the job's own folder."""
    own = code_root(request.job).resolve()
    named = {getattr(module, "__file__", None) for module in [*sys.modules.values()]}
    found = {
        os.path.realpath(name) for name in named if isinstance(name, str) and os.path.isabs(name)
    }
    return sorted(
        name for name in found if os.path.isfile(name) and not Path(name).is_relative_to(own)
    )


def _measure(request: ProfileRequest, options: argparse.Namespace) -> Workload:
    from workers.profiling.profiler import Profiler  # brings pandas: only where it is needed

    return Profiler(
        request,
        options.type,
        _say,
        units=options.units,
        batch=options.batch,
        bytes_per_s=options.bytes_per_s,
    ).run()


def _end(number: int, frame: FrameType | None) -> None:
    """End in order: what was started and written for the measurement goes first."""
    raise _Ended(128 + number)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
