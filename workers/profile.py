"""The process that profiles a job for a node: `python -m workers.profile --request FILE`."""

import argparse
import os
import sys
import traceback
from pathlib import Path

import torch

from protos import process
from protos.node_pb2 import ProfileRequest
from workers.profiler import Profiler


def main(argv: list[str] | None = None) -> int:
    """Write the measured `Workload` of a `ProfileRequest`; 1 and a last line when it fails."""
    parser = argparse.ArgumentParser(prog="workers.profile", description=__doc__)
    parser.add_argument("--request", required=True, type=Path, help="serialized ProfileRequest")
    parser.add_argument("--result", required=True, type=Path, help="where the Workload goes")
    parser.add_argument("--type", required=True, help="the resource type of this node")
    parser.add_argument("--ready-file", type=Path)
    arguments = parser.parse_args(argv)
    process.setup_logging("profile")
    process.lifeline()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    request = ProfileRequest.FromString(arguments.request.read_bytes())
    types = {t.name: t for t in request.resources.types}
    here = types.get(arguments.type)
    try:
        if here is None:
            raise ValueError(
                f"resources: this node is of type {arguments.type!r}; expected one of "
                f"{', '.join(types)}"
            )
        profiler = Profiler(request.job, here, [t for t in types.values() if t is not here], _say)
        workload = profiler.run(request.resources)
    except Exception as error:
        if not isinstance(error, ValueError):  # those speak of the user's files, not of ours
            traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    temporary = arguments.result.with_name(arguments.result.name + ".tmp")
    temporary.write_bytes(workload.SerializeToString())
    os.replace(temporary, arguments.result)
    return 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
