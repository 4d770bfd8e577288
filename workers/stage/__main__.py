"""The process of one worker of one stage: `python -m workers.stage --launch FILE`."""

import argparse
import logging
import sys
import threading
from pathlib import Path

from chassis import process, tracing
from chassis.exits import exit_code_of
from chassis.logs import log_fields
from protos.node_pb2 import LaunchRequest
from workers.links.inbox import Stopped
from workers.model.code.brought import enter
from workers.stage.report.failure import end_reason_of, told
from workers.stage.worker import Worker

_log = logging.getLogger("heterps.stage")


def main(argv: list[str] | None = None) -> int:
    """Run one worker to the job's end; 0 when it succeeded or was stopped on request."""
    parser = argparse.ArgumentParser(prog="workers.stage", description=__doc__)
    parser.add_argument("--launch", required=True, type=Path, help="serialized LaunchRequest")
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--bind", default="127.0.0.1:0")
    arguments = parser.parse_args(argv)
    launch = LaunchRequest.FromString(arguments.launch.read_bytes())
    process.setup_logging(f"stage {launch.index} worker {launch.rank}")
    log_fields(job=launch.job_id, stage=launch.index, worker=launch.rank)
    enter(launch.job)
    tracing.begin_job(launch.job_id)
    stop = threading.Event()
    # Without its node nothing of it counts, and the others wait until its connections close.
    process.install_signals(stop, grace_s=0.0)
    try:
        Worker(launch, arguments.bind, stop, arguments.launch).run(arguments.ready_file)
    except Stopped:
        _log.info("stopped")
    except (Exception, SystemExit) as error:  # the job's code may end the process, or try to
        if stop.is_set():
            _log.info("stopped: %s", error)
            return 0
        _log.exception("failed")
        print(told(error), file=sys.stderr, flush=True)
        return exit_code_of(end_reason_of(error, launch.job))
    return 0


if __name__ == "__main__":
    sys.exit(main())
