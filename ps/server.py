"""One shard of the parameter server, as a process.

Usage: python -m ps.server --bind 127.0.0.1:0 [--ready-file F] [--restore DIR --shard I --shards N]
"""

import argparse
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from protos.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from protos.process import announce, install_signals, setup_logging
from protos.security import SecurityError
from protos.servers import BindError, Server
from ps.errors import CheckpointError
from ps.service import ParameterService

_log = logging.getLogger("heterps.ps")


def serve(
    bind: str,
    *,
    stop: threading.Event,
    restore: Path | None = None,
    shard: int = 0,
    shards: int = 1,
    threads: int = 16,
    ready: Callable[[str], None] = lambda address: None,
) -> None:
    """Serve one shard until `stop` is set.

    Args:
        bind: host:port, port 0 for any free one.
        stop: set by whoever ends it.
        restore: a checkpoint to begin with; rows of other shards are left out.
        shard: which one this is.
        shards: of how many.
        threads: how many calls are handled at once.
        ready: called with the address once calls are answered.

    Raises:
        BindError, SecurityError, CheckpointError: before anything is served.
    """
    service = ParameterService()
    server = Server("ps", bind, threads=threads)
    server.add(
        add_ParameterServerServicer_to_server,
        service,
        "heterps.v1.ParameterServer",
        raw={"Pull": service.pull, "Push": service.push},
    )
    if restore is not None:
        service.restore(restore, shard, shards)
    address = server.start()
    _log.info("shard %d of %d listens on %s", shard, shards, address)
    ready(address)
    stop.wait()
    _log.info("stopping")
    server.stop(5.0)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="heterps ps", description="Run one shard.")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--ready-file", metavar="FILE", help="written once calls are answered")
    parser.add_argument("--restore", type=Path, metavar="DIR", help="checkpoint to begin with")
    parser.add_argument("--shard", type=int, default=0, help="which shard this is")
    parser.add_argument("--shards", type=int, default=1, help="of how many")
    parser.add_argument("--threads", type=int, default=16, help="calls handled at once")
    options = parser.parse_args(argv)
    if not 0 <= options.shard < options.shards:
        parser.error(f"--shard {options.shard}: expected 0 to {options.shards - 1} (--shards - 1)")
    setup_logging(f"ps {options.shard}")
    stop = threading.Event()
    install_signals(stop)
    try:
        serve(
            options.bind,
            stop=stop,
            restore=options.restore,
            shard=options.shard,
            shards=options.shards,
            threads=options.threads,
            ready=lambda address: announce(options.ready_file, address=address),
        )
    except (BindError, SecurityError, CheckpointError) as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
