"""One shard of the parameter server, as a process.

Usage: python -m ps.server --bind 127.0.0.1:0 [--data DIR] [--restore DIR --shard I --shards N]
"""

import argparse
import logging
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path

from chassis import written
from chassis.channels import RpcError
from chassis.exits import DAMAGED, exit_code_of
from chassis.lease import Lease
from chassis.logs import log_fields
from chassis.memory import keep_buffers
from chassis.metrics import add_metrics_option, serve_metrics
from chassis.process import announce, install_signals, setup_logging
from chassis.security import SecurityError
from chassis.servers import TENSOR_BYTES, BindError, Server
from protos.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from protos.scheduler_pb2 import END_DISK_FULL, NodeStatus
from ps.errors import CheckpointError, DamageError, NoRoomError, TableError, is_disk_full
from ps.server.maintenance import Maintenance
from ps.server.service import ParameterService
from ps.shard.directory import ShardDirectory
from ps.shard.load import restore
from ps.shard.replica import Replicator
from ps.shard.state import ShardState
from ps.table.buckets import Share

_SCHEDULER_S = 30.0
_log = logging.getLogger("heterps.ps")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How one shard runs.

    Attributes:
        bind: host:port, port 0 for any free one.
        shard: which one this is.
        shards: of how many.
        restore: a checkpoint, path or URL, to begin with; rows of other shards are left out. Once
            `data` or the replica has something, only tables without a durability are taken.
        save: the save that `restore` must have, so that all shards begin with the same one.
        data: a directory of this shard alone: what survives it, and rows that do not fit memory.
        disk: another directory for the latter.
        sync: wait for the disk before a push is acknowledged.
        accept_loss: where `data` is damaged, begin with what is whole, and keep the rest aside.
        fold_s: how old the base of tables with durability=checkpoint may be.
        replica: another shard's address, to be told every change.
        threads: how many calls are handled at once, and as many more that come by streams.
        stream_port: where clients of other hosts send bulk bytes; 0 for any free one.
        scheduler: offer this shard to the jobs of that scheduler, for as long as it lives.
        advertise: the host to be reached at, where it is not that of `bind`.
        metrics: host:port for Prometheus.
    """

    bind: str = "127.0.0.1:0"
    shard: int = 0
    shards: int = 1
    restore: str = ""
    save: str = ""
    data: Path | None = None
    disk: Path | None = None
    sync: bool = False
    accept_loss: bool = False
    fold_s: float = 300.0
    replica: str = ""
    threads: int = 16
    stream_port: int = 0
    scheduler: str = ""
    advertise: str = ""
    metrics: str = ""


def serve(
    settings: Settings,
    stop: threading.Event,
    ready: Callable[[str, str], None] = lambda address, metrics: None,
) -> None:
    """Serve one shard until `stop` is set.

    Args:
        settings: how.
        stop: set by whoever ends it.
        ready: called with the address, and that of the metrics, once calls are answered.

    Raises:
        BindError, SecurityError, CheckpointError, TableError: before anything is served.
        RpcError: the scheduler did not answer.
    """
    with ExitStack() as ends:
        disk = settings.disk or settings.data
        state = ShardState(str(disk) if disk else "")
        if disk is not None:
            written.claim(disk)
        service = ParameterService(state, settings.threads)
        server = Server("ps", settings.bind, threads=settings.threads, most_bytes=TENSOR_BYTES)
        server.add(
            add_ParameterServerServicer_to_server,
            service,
            "heterps.v1.ParameterServer",
            raw={
                "Pull": service.pull,
                "Push": service.push,
                "Stage": service.stage,
                "Tally": service.tally,
                "Commit": service.commit,
                "Replicate": service.replicate,
                "Keys": service.keys,
            },
        )
        durable, replicator = _recover(settings, state, ends)
        if durable is not None:
            service.log_bytes = lambda: durable.log.bytes
        ends.callback(Maintenance(state, durable, replicator).close)
        # First: who calls by gRPC is told of it.
        service.listen(settings.bind.rpartition(":")[0], settings.stream_port, settings.threads)
        ends.callback(service.hang_up, 5.0)
        address = server.start()
        ends.callback(server.stop, 5.0)
        metrics = ""
        if settings.metrics:
            metrics, close = serve_metrics(settings.metrics, service.metrics.metrics)
            ends.callback(close)
        _log.info("shard %d of %d listens on %s", settings.shard, settings.shards, address)
        if settings.scheduler:
            where = _advertised(address, settings.advertise)
            keeps = settings.data is not None
            ends.callback(_register(settings.scheduler, where, keeps, stop).close)
        ready(address, metrics)
        stop.wait()
        _log.info("stopping")


def _recover(
    settings: Settings, state: ShardState, ends: ExitStack
) -> tuple[ShardDirectory | None, Replicator | None]:
    """Whatever was there before.

    Tables with a durability come from the shard's own data or its replica. The others, or, where
    neither has anything, all of them, come from the checkpoint.
    """
    durable, replicator, recovered = None, None, False
    if settings.data is not None:
        durable = ShardDirectory(
            state,
            settings.data,
            sync=settings.sync,
            interval_s=settings.fold_s,
            accept_loss=settings.accept_loss,
        )
        ends.callback(durable.close)
        recovered = durable.recovered
    if settings.replica:
        replicator = Replicator(state, settings.replica)
        ends.callback(replicator.close)
        recovered = recovered or replicator.recovered
    if settings.restore:
        share = Share(settings.shard, settings.shards)
        restore(state, settings.restore, share, save=settings.save, lasting=not recovered)
    return durable, replicator


def _advertised(address: str, host: str) -> str:
    return f"{host}:{address.rpartition(':')[2]}" if host else address


def _register(scheduler: str, address: str, keeps: bool, stop: threading.Event) -> Lease:
    """Take a lease as a standing shard; shards are numbered in the order of their names."""
    status = NodeStatus(node_id=f"shard-{address}", kind="shard", address=address, keeps_rows=keeps)
    lease = Lease(scheduler, lambda: status)
    lease.start(_SCHEDULER_S, stop.is_set)
    return lease


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="heterps ps", description="Run one shard.")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--ready-file", metavar="FILE", help="written once calls are answered")
    parser.add_argument("--restore", default="", metavar="DIR", help="checkpoint to begin with")
    parser.add_argument(
        "--save",
        default="",
        metavar="CHECKSUM",
        help="of the save that --restore must have, as `heterps ps save` tells it",
    )
    parser.add_argument("--shard", type=int, default=0, help="which shard this is")
    parser.add_argument("--shards", type=int, default=1, help="of how many")
    parser.add_argument("--data", type=Path, metavar="DIR", help="what survives this shard")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="for rows that exceed memory")
    parser.add_argument(
        "--sync", action="store_true", help="acknowledge a push once the disk has it"
    )
    parser.add_argument(
        "--accept-loss",
        action="store_true",
        help="start although DIR is damaged, without what cannot be read; the files are kept",
    )
    parser.add_argument(
        "--fold",
        type=float,
        default=300.0,
        dest="fold_s",
        metavar="SECONDS",
        help="age of a base, at most",
    )
    parser.add_argument("--replica", default="", metavar="HOST:PORT", help="told every change")
    parser.add_argument("--threads", type=int, default=16, help="calls handled at once")
    parser.add_argument(
        "--stream-port",
        type=int,
        default=0,
        metavar="PORT",
        help="for bulk bytes of clients on other hosts, any free one unless given",
    )
    parser.add_argument("--scheduler", default="", metavar="HOST:PORT", help="offer it to jobs")
    parser.add_argument("--advertise", default="", metavar="HOST", help="where others reach it")
    parser.add_argument("--job", default="", metavar="ID", help="whose shard it is, for its log")
    add_metrics_option(parser)
    options = parser.parse_args(argv)
    if not 0 <= options.shard < options.shards:
        parser.error(f"--shard {options.shard}: expected 0 to {options.shards - 1} (--shards - 1)")
    setup_logging(f"ps {options.shard}")
    log_fields(shard=options.shard, **({"job": options.job} if options.job else {}))
    keep_buffers()
    stop = threading.Event()
    install_signals(stop)
    settings = Settings(**{field.name: getattr(options, field.name) for field in fields(Settings)})
    try:
        serve(
            settings,
            stop,
            lambda address, metrics: announce(options.ready_file, address=address, metrics=metrics),
        )
    except DamageError as error:
        _log.error("%s", error)
        return DAMAGED
    except (
        BindError,
        SecurityError,
        CheckpointError,
        TableError,
        NoRoomError,
        RpcError,
        OSError,
    ) as error:
        _log.error("%s", error)
        return exit_code_of(END_DISK_FULL) if is_disk_full(error) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
