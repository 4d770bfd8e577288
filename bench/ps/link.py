"""How much of a network link pulls and pushes use: client and shard in two network namespaces.

The link between them is shaped by `tc tbf`; beside each rate stands what one plain TCP connection
carries over it, and what the calls do over a link of no limit: the processors' own. As between
hosts, all is TLS 1.3 with a token. Needs root, and `ip` and `tc` of iproute2.

    python -m bench.ps.link [--rates 0,9,0.96] [--rounds 5] [--json FILE]
"""

import argparse
import datetime
import json
import os
import secrets
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from bench.pages import RESULTS, ROOT, machine, versions, write
from chassis.process import Child, module_argv, spawn
from heterps.home import certs
from ps import ParameterClient

_HERE, _THERE = "10.77.0.1", "10.77.0.2"
_DEVICE = "bench0"
_KEYS = 106_496
_ROWS = 1_000_000
_TABLE = "rows"
_PLAIN_BYTES = 64 << 20
_SINK_PORT = 7070
_AHEAD = 3  # calls under way


@contextmanager
def link() -> Iterator[tuple[str, str]]:
    """Two namespaces joined by a pair of interfaces; their names."""
    number = secrets.token_hex(3)
    here, there = f"heterps-{number}-a", f"heterps-{number}-b"
    try:
        for name in (here, there):
            _run("ip", "netns", "add", name)
        ends = ("netns", here, "type", "veth", "peer", "name", _DEVICE, "netns", there)
        _run("ip", "link", "add", _DEVICE, *ends)
        for name, address in ((here, _HERE), (there, _THERE)):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", _DEVICE)
            for device in ("lo", _DEVICE):
                _run("ip", "-n", name, "link", "set", device, "up")
        yield here, there
    finally:
        for name in (here, there):
            _try("ip", "netns", "delete", name)


def shape(namespaces: tuple[str, str], gbit_s: float) -> None:
    """Limit both directions; 0: to nothing."""
    for name in namespaces:
        inside = ("ip", "netns", "exec", name, "tc", "qdisc")
        subprocess.run(
            (*inside, "delete", "dev", _DEVICE, "root"), check=False, capture_output=True
        )
        if gbit_s:
            # A burst of a millisecond, at least of what the kernel sends at once.
            burst = max(int(gbit_s * 1e9 / 8 / 1000), 128 << 10)
            limits = ("rate", f"{gbit_s}gbit", "burst", str(burst), "latency", "50ms")
            _run(*inside, "add", "dev", _DEVICE, "root", "tbf", *limits)


def _run(*argv: str) -> None:
    subprocess.run(argv, check=True)


def _try(*argv: str) -> None:
    subprocess.run(argv, check=False, capture_output=True)


def main() -> int:
    arguments = _parse()
    if arguments.client:
        return _client(arguments.client, arguments.dim, arguments.rounds)
    if arguments.sink:
        return _sink()
    found: list[dict[str, object]] = []
    with link() as (here, there), tempfile.TemporaryDirectory(prefix="heterps-link-") as folder:
        environment = certs.make(Path(folder) / "certificates", [_THERE])
        shard = _shard(there, Path(folder), environment)
        sink = subprocess.Popen(_inside(there, *_again("--sink")), cwd=ROOT)
        try:
            for rate in map(float, arguments.rates.split(",")):
                shape((here, there), rate)
                for dim in map(int, arguments.dims.split(",")):
                    asked = ("--client", shard.address, "--dim", str(dim))
                    more = ("--rounds", str(arguments.rounds))
                    told = subprocess.run(
                        _inside(here, *_again(*asked, *more)),
                        cwd=ROOT,
                        env={**os.environ, **environment},
                        check=True,
                        stdout=subprocess.PIPE,
                        text=True,
                    ).stdout
                    found.append({"gbit_s": rate, "dim": dim, **json.loads(told)})
                    print(found[-1], flush=True)
        finally:
            sink.kill()
            sink.wait()
            shard.stop(2.0)
    _judge(found)
    results = {
        "benchmark": "link",
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions("numpy", "grpcio"),
        "settings": {"keys": _KEYS, "rows": _ROWS, "ahead": _AHEAD, "rounds": arguments.rounds},
        "measured": found,
    }
    write(arguments.json, json.dumps(results, indent=1) + "\n")
    return 0


def _judge(found: list[dict[str, object]]) -> None:
    """Note of each call its share of what the link, or the processors, allow."""
    free = {one["dim"]: one for one in found if not one["gbit_s"]}
    for one in found:
        of = free.get(one["dim"])
        if of is None or not one["gbit_s"]:
            continue
        for call in ("pull", "push"):
            bound = min(float(str(one["gbit_s"])), float(str(of[call])))
            one[f"{call}_share"] = round(float(str(one[call])) / bound, 3)


def _shard(there: str, folder: Path, environment: Mapping[str, str]) -> Child:
    argv = _inside(there, *module_argv("ps.server", "--bind", f"{_THERE}:0"))
    return spawn("shard", argv, directory=folder, environment=environment).wait_ready(60.0)


def _inside(namespace: str, *argv: str) -> list[str]:
    return ["ip", "netns", "exec", namespace, *argv]


def _again(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "bench.ps.link", *arguments]


def _sink() -> int:
    """Take whatever comes, and say once a connection has ended."""
    with socket.create_server((_THERE, _SINK_PORT)) as server:
        while True:
            connection, _ = server.accept()
            with connection:
                room = bytearray(1 << 20)
                while connection.recv_into(room):
                    pass
                connection.sendall(b"\0")


def _plain() -> float:
    """Gbit/s of a plain connection."""
    block = bytes(1 << 20)
    with socket.create_connection((_THERE, _SINK_PORT), 10.0) as connection:
        began = time.perf_counter()
        for _ in range(_PLAIN_BYTES // len(block)):
            connection.sendall(block)
        connection.shutdown(socket.SHUT_WR)
        connection.recv(1)
        return _PLAIN_BYTES * 8e-9 / (time.perf_counter() - began)


def _client(address: str, dim: int, rounds: int) -> int:
    """Time plain bytes, pulls and pushes in turns, in Gbit/s of keys and rows."""
    random = np.random.default_rng(1)
    table = f"{_TABLE}{dim}"
    rates: dict[str, list[float]] = {"plain": [], "pull": [], "push": []}
    with ParameterClient([address], shared_memory=False) as client:
        client.create_table(table, dim=dim, optimizer="adagrad")
        for first in range(0, _ROWS, _KEYS):
            keys = np.arange(first, first + _KEYS)
            client.push(table, keys << 20, np.ones((len(keys), dim), np.float32))
        batches = [random.choice(_ROWS, _KEYS, replace=False) << 20 for _ in range(12)]
        grads = np.ones((_KEYS, dim), np.float32)
        bits = 8e-9 * _KEYS
        for _ in range(rounds + 1):
            rates["plain"].append(_plain())
            began = time.perf_counter()
            waiting = [client.pull_async(table, keys) for keys in batches[:_AHEAD]]
            for keys in batches[_AHEAD:]:
                waiting.pop(0).result()
                waiting.append(client.pull_async(table, keys))
            for one in waiting:
                one.result()
            took = time.perf_counter() - began
            rates["pull"].append(bits * len(batches) * 4 * dim / took)
            began = time.perf_counter()
            pushed = [client.push_async(table, keys, grads) for keys in batches[:_AHEAD]]
            for keys in batches[_AHEAD:]:
                pushed.pop(0).result()
                pushed.append(client.push_async(table, keys, grads))
            for last in pushed:
                last.result()
            took = time.perf_counter() - began
            rates["push"].append(bits * len(batches) * (8 + 4 * dim) / took)
    print(json.dumps({n: round(statistics.median(some[1:]), 3) for n, some in rates.items()}))
    return 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rates", default="0,9,0.96", help="Gbit/s; 0: no limit")
    parser.add_argument("--dims", default="16,64")
    parser.add_argument("--dim", type=int, default=16, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, default=RESULTS / "ps_link.json")
    parser.add_argument("--client", default="", help=argparse.SUPPRESS)
    parser.add_argument("--sink", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
