"""The daemon on each host: profiles, starts, watches and stops the processes of jobs.

Usage: python -m workers.node --type cpu --scheduler HOST:PORT [--units N] [--emulate]
"""

import argparse
import logging
import os
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from chassis import scratch, written
from chassis.channels import RpcError
from chassis.lease import Lease
from chassis.loops import Loops
from chassis.metrics import add_metrics_option, serve_metrics
from chassis.process import announce, install_signals, setup_logging
from chassis.security import SecurityError
from chassis.servers import BindError, Server
from protos.node_pb2_grpc import add_NodeServicer_to_server
from protos.scheduler_pb2 import HeartbeatReply, NodeStatus
from workers.device.units import gpus_of
from workers.links.plain import plain_allowed
from workers.model.code.brought import CodeCache
from workers.node import privileges
from workers.node.draining import NOTICE_S, Draining
from workers.node.hardware import DeviceError, find_hardware
from workers.node.kept_profiles import KeptProfiles, folder_of
from workers.node.processes import Processes
from workers.node.service import NodeService
from workers.node.starting import fork_server
from workers.node.users import Users
from workers.node.whereabouts import WhereaboutsError, announced

_GRACE_S = 3.0
_log = logging.getLogger("heterps.node")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    options = _parser().parse_args(argv)
    setup_logging(f"node {options.type}")
    stop = threading.Event()
    draining = Draining(options.notice, stop)
    install_signals(stop, draining.begin)
    try:
        host = options.bind.rpartition(":")[0]
        if options.user and options.user_per_job:
            raise SecurityError("--user, --user-per-job: expected one of them")
        users = Users(options.user_per_job) if options.user_per_job else None
        privileges.settle(options.user, host, options.allow_root or users is not None)
        _run(options, stop, draining, users)
    except (BindError, SecurityError, DeviceError, RpcError, WhereaboutsError) as error:
        _log.error("%s", error)
        return 1
    return 0


def _run(
    options: argparse.Namespace, stop: threading.Event, draining: Draining, users: Users | None
) -> None:
    device = options.device or ("cpu" if options.type.lower().startswith("cpu") else "cuda")
    host = options.advertise or options.bind.rpartition(":")[0]
    lease: Lease | None = None
    loops = Loops()

    def changed() -> None:
        if lease is not None:
            lease.kick()

    with ExitStack() as stack:
        directory = options.directory or _temporary(stack, users)
        written.claim(directory)
        forks = fork_server(directory.resolve())
        stack.callback(forks.close)
        if not options.cold:
            forks.warm()  # it takes longer than all that follows here
        hardware = find_hardware(options.type, device, options.emulate)
        scheduler = options.scheduler or announced(options.found_in, options.wait, stop)
        if not scheduler:
            return
        code = CodeCache(directory.resolve() / ".code", scheduler)  # no job has that id
        on_gpus = device == "cuda" and not options.emulate
        processes = Processes(
            *(directory.resolve(), host, options.ready_timeout, changed),
            code=code,
            loops=loops,
            gpus=gpus_of(hardware.units, os.environ) if on_gpus else (),
            users=users,
            forks=forks,
        )
        stack.callback(processes.close, _GRACE_S)
        status = NodeStatus(
            node_id=options.node_id or f"{options.type}-{uuid.uuid4().hex[:6]}",
            kind="node",
            type=options.type,
            units=options.units or hardware.units,
            emulated=options.emulate,
            device=f"{hardware.name} on {socket.gethostname()}",
            cores=hardware.cores,
            without_bf16=not hardware.bf16,
            plain_collectives=plain_allowed(),
        )

        def follow(scheduler: str) -> None:
            processes.follow(scheduler)
            code.follow(scheduler)
            if lease is not None:
                lease.move(scheduler)

        profiles = KeptProfiles(options.type, status.device, status.units, folder_of(os.environ))
        service = NodeService(status, processes, stop, code, draining, profiles, follow)

        def answered(reply: HeartbeatReply) -> None:
            if not service.heard(reply.term):
                return
            if reply.warm and draining.ends_in_s is None:
                processes.warm()

        server = Server("node", options.bind, threads=64)  # each Launch waits for its process
        server.add(add_NodeServicer_to_server, service, "heterps.v1.Node")
        status.address = f"{host}:{server.start().rpartition(':')[2]}"
        stack.callback(server.stop, 0.5)
        facts = {}
        if options.metrics:
            from workers.node.metrics import node_metrics

            facts["metrics"], close = serve_metrics(
                options.metrics, node_metrics(service.status, loops)
            )
            stack.callback(close)
        loops.changed = lambda: server.set_health(serving=not loops.failing)
        lease = Lease(
            *(scheduler, service.status),
            answered=answered,
            loops=loops,
        )
        lease.start(options.wait, stop.is_set)
        stack.callback(lease.close)  # first of all: nobody is to see the children end
        draining.serve(service.busy, changed)
        if options.notice_from:
            draining.watch(options.notice_from, loops)
        _log.info(
            "%s: %d units of %s at %s", status.node_id, status.units, hardware.name, status.address
        )
        announce(options.ready_file, address=status.address, node_id=status.node_id, **facts)
        stop.wait()
        _log.info("stopping")


def _temporary(stack: ExitStack, users: Users | None) -> Path:
    """A folder that goes at the end, or, was this node killed, when the next one starts."""
    if users is not None:  # they have to pass through the folders above it
        made = tempfile.TemporaryDirectory(prefix="heterps-node-", ignore_cleanup_errors=True)
        return Path(stack.enter_context(made))
    folder = scratch.temporary("node")
    stack.callback(scratch.discard, folder)
    return folder


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="heterps node", description="Run the node daemon.")
    parser.add_argument("--type", required=True, help="resource type, a name of the price list")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--scheduler", metavar="HOST:PORT")
    where.add_argument(
        "--found-in",
        type=Path,
        metavar="FILE",
        help="the ready file of a scheduler that is being started, waited for as by --wait",
    )
    parser.add_argument(
        "--cold",
        action="store_true",
        help="import what workers need with the first of them, which starts some seconds later; "
        "a node that never has one stays small",
    )
    parser.add_argument(
        "--units", type=_units, help="cores or GPUs to offer; default: all that are there"
    )
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument("--advertise", default="", metavar="HOST", help="host for others to call")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: by the type's name")
    parser.add_argument(
        "--emulate", action="store_true", help="offer the type without its device, on the CPU"
    )
    parser.add_argument("--directory", type=Path, help="logs; default: temporary")
    parser.add_argument(
        "--user", default="", metavar="NAME", help="started as root, become this user first"
    )
    parser.add_argument(
        "--allow-root",
        action="store_true",
        default=os.environ.get(privileges.ALLOW_ROOT) == "1",
        help="run jobs as root where other machines can submit them",
    )
    parser.add_argument(
        "--user-per-job",
        default="",
        metavar="FIRST-LAST",
        help="as root, run each job as a user of its own out of these numbers",
    )
    parser.add_argument("--node-id", default="", help="default: the type and a random part")
    parser.add_argument(
        "--ready-timeout", type=float, default=180.0, metavar="S", help="for a job's process"
    )
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="S", help="for the scheduler at the start"
    )
    parser.add_argument(
        "--notice",
        type=_seconds,
        default=NOTICE_S,
        metavar="S",
        help="seconds that jobs have to leave, from SIGTERM on; default: %(default)g",
    )
    parser.add_argument(
        "--notice-from",
        default="",
        metavar="PLACE",
        help="a file, or URL, that is there once this machine goes away: as SIGTERM",
    )
    add_metrics_option(parser)
    parser.add_argument("--ready-file", metavar="FILE", help="written once the lease is held")
    return parser


def _units(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number of 1 or more")
    return int(text)


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found < 86400:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, from 0 to a day")
    return found


if __name__ == "__main__":
    sys.exit(main())
