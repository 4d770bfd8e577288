"""One shard of the parameter server, as a process.

Usage: python -m ps.server --bind 127.0.0.1:0 [--ready-file F] [--restore DIR --shard I --shards N]
"""

import argparse
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from protos.channels import RpcError
from protos.lease import Lease
from protos.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from protos.process import announce, install_signals, setup_logging
from protos.scheduler_pb2 import NodeStatus
from protos.security import SecurityError
from protos.servers import BindError, Server
from ps.errors import CheckpointError
from ps.service import ParameterService

_SCHEDULER_S = 30.0
_log = logging.getLogger("heterps.ps")


def serve(
    bind: str,
    *,
    stop: threading.Event,
    restore: Path | None = None,
    shard: int = 0,
    shards: int = 1,
    threads: int = 16,
    scheduler: str = "",
    advertise: str = "",
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
        scheduler: offer this shard to the jobs of that scheduler, for as long as it lives.
        advertise: the host to be reached at, where it is not that of `bind`.
        ready: called with the address once calls are answered.

    Raises:
        BindError, SecurityError, CheckpointError: before anything is served.
        RpcError: the scheduler did not answer.
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
    lease = _stand(scheduler, _advertised(address, advertise), stop) if scheduler else None
    ready(address)
    stop.wait()
    _log.info("stopping")
    if lease is not None:
        lease.close()
    server.stop(5.0)


def _advertised(address: str, host: str) -> str:
    return f"{host}:{address.rpartition(':')[2]}" if host else address


def _stand(scheduler: str, address: str, stop: threading.Event) -> Lease:
    """Take a lease as a standing shard; shards are numbered in the order of their names."""
    status = NodeStatus(node_id=f"shard-{address}", kind="shard", address=address)
    lease = Lease(scheduler, lambda: status)
    lease.start(_SCHEDULER_S, stop.is_set)
    return lease


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="heterps ps", description="Run one shard.")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--ready-file", metavar="FILE", help="written once calls are answered")
    parser.add_argument("--restore", type=Path, metavar="DIR", help="checkpoint to begin with")
    parser.add_argument("--shard", type=int, default=0, help="which shard this is")
    parser.add_argument("--shards", type=int, default=1, help="of how many")
    parser.add_argument("--threads", type=int, default=16, help="calls handled at once")
    parser.add_argument("--scheduler", default="", metavar="HOST:PORT", help="offer it to jobs")
    parser.add_argument("--advertise", default="", metavar="HOST", help="where others reach it")
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
            scheduler=options.scheduler,
            advertise=options.advertise,
            ready=lambda address: announce(options.ready_file, address=address),
        )
    except (BindError, SecurityError, CheckpointError, RpcError) as error:
        _log.error("%s", error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
