"""The scheduler's command line.

Usage: python -m scheduler.service [--bind HOST:PORT] [--redis URL] [--ready-file F]
"""

import argparse
import logging
import os
import sys
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

from chassis.metrics import add_metrics_option, serve_metrics
from chassis.process import announce, install_signals, setup_logging
from chassis.security import SecurityError
from chassis.servers import BindError
from scheduler.service.artifacts import CODE_LIMIT_BYTES, LIMIT_BYTES
from scheduler.service.process import SchedulerProcess
from scheduler.state import redis_tls
from scheduler.state.jobs import KEPT
from scheduler.state.leadership import HeldError
from scheduler.state.nodes import LEASE_S
from scheduler.state.redis_server import EmbeddedRedis, RedisServerError
from scheduler.state.store import StoreError

_LOOK_S = 1.0
_log = logging.getLogger("heterps.scheduler")


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog="heterps scheduler", description="Run the scheduler.")
    parser.add_argument("--bind", default="127.0.0.1:0", metavar="HOST:PORT")
    parser.add_argument(
        "--redis",
        default=os.environ.get("HETERPS_REDIS", ""),
        metavar="URL",
        help="rediss://:PASSWORD@HOST:PORT/DB, or redis:// on this machine; without it a server "
        "of its own is started",
    )
    parser.add_argument(
        "--allow-plain-redis",
        action="store_true",
        help="speak to a Redis of another host without TLS or a password",
    )
    parser.add_argument(
        "--redis-file", type=Path, metavar="FILE", help="holds that URL: it may have a password"
    )
    parser.add_argument("--directory", type=Path, help="where its own server keeps its data")
    parser.add_argument(
        "--artifacts",
        type=Path,
        metavar="DIR",
        help="where the code and the models of jobs are kept; default: in --directory",
    )
    parser.add_argument("--artifacts-limit", type=int, default=LIMIT_BYTES, metavar="BYTES")
    parser.add_argument("--code-limit", type=int, default=CODE_LIMIT_BYTES, metavar="BYTES")
    parser.add_argument(
        "--keep-jobs",
        type=int,
        default=KEPT,
        metavar="N",
        help="of the jobs that have ended the latest N are kept, with decision, logs and history; "
        "default: %(default)s",
    )
    parser.add_argument("--advertise", default="", metavar="HOST", help="host for others to call")
    parser.add_argument("--lease", type=float, default=LEASE_S, metavar="SECONDS")
    add_metrics_option(parser)
    parser.add_argument("--ready-file", metavar="FILE", help="written once calls are answered")
    options = parser.parse_args(argv)
    setup_logging("scheduler")
    stop = threading.Event()
    install_signals(stop)
    try:
        with ExitStack() as stack:
            url, facts = options.redis, {}
            own: EmbeddedRedis | None = None
            if options.redis_file is not None:
                url = options.redis_file.read_text().strip()
            redis_tls.require(url, options.allow_plain_redis)
            if not url:
                directory = options.directory or stack.enter_context(
                    TemporaryDirectory(prefix="heterps-redis-", ignore_cleanup_errors=True)
                )
                own = stack.enter_context(EmbeddedRedis(directory))
                url = own.url
                facts = {"redis": url}  # a given one may hold a password
            if options.redis and not (options.artifacts or options.directory):
                _log.warning(
                    "code and models of jobs end with this process; --artifacts DIR keeps them"
                )
            scheduler = SchedulerProcess(
                options.bind,
                url,
                advertise=options.advertise,
                lease_s=options.lease,
                # Data that is removed with this process can be taken up by nobody.
                hand_over=bool(options.redis or options.directory),
                artifacts=options.artifacts or _artifacts_in(options.directory),
                artifacts_limit=options.artifacts_limit,
                code_limit=options.code_limit,
                keep_jobs=max(0, options.keep_jobs),
            )
            address = scheduler.start(stop.set)
            stack.callback(scheduler.stop)
            _log.info("listens on %s", address)
            if options.metrics:
                facts["metrics"], close = serve_metrics(
                    options.metrics, scheduler.metrics(), scheduler.admits_to_metrics
                )
                stack.callback(close)
            announce(options.ready_file, address=address, **facts)
            while not stop.wait(_LOOK_S):
                if own is not None:
                    own.check()  # nobody starts it again, so this scheduler serves no more
            _log.info("stopping")
    except (BindError, SecurityError, StoreError, HeldError, RedisServerError, OSError) as error:
        _log.error("%s", error)
        return 1
    return 0


def _artifacts_in(directory: Path | None) -> Path | None:
    return directory / "artifacts" if directory is not None else None


if __name__ == "__main__":
    sys.exit(main())
