"""Shards that are killed at random, and a network that loses, repeats and delays: exactly once."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from chassis.channels import call, connect
from protos import parameter_server_pb2 as pb
from protos.parameter_server_pb2_grpc import ParameterServerStub
from ps import CheckpointError, LocalShards, LocalTable, ParameterClient, ShardError
from tests.rounds import more, rounds
from tests.waiting import wait_until

KEYS = np.arange(6000)
DIM = 8


def _make(client: ParameterClient, durability: str, memory_bytes: int = 0) -> None:
    client.create_table(
        "t",
        DIM,
        optimizer="sgd",
        learning_rate=1.0,
        initializer="zeros",
        durability=durability,
        memory_bytes=memory_bytes,
    )


class Counter(threading.Thread):
    """Adds 1 to random keys and counts what was acknowledged."""

    def __init__(self, addresses: list[str], seed: int) -> None:
        super().__init__(daemon=True)
        self.client = ParameterClient(addresses, timeout_s=60, shared_memory=seed % 2 == 0)
        self.counts = np.zeros(len(KEYS), np.int64)
        self.pushes = 0
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self._rng = np.random.default_rng(seed)

    def run(self) -> None:
        try:
            while not self.ended.is_set():
                keys = self._rng.choice(KEYS, 300, replace=False)
                self.client.push("t", keys, np.full((300, DIM), -1, np.float32))
                self.counts[keys] += 1
                self.pushes += 1
        except BaseException as error:
            self.error = error


class Reader(threading.Thread):
    """Looks at rows all the time; they never go backwards."""

    def __init__(self, addresses: list[str]) -> None:
        super().__init__(daemon=True)
        self.client = ParameterClient(addresses, timeout_s=60)
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        try:
            last = np.zeros((len(KEYS), DIM), np.float32)
            while not self.ended.wait(0.01):
                rows = self.client.pull("t", KEYS)
                assert (rows >= last).all(), f"{int((rows < last).any(1).sum())} rows went back"
                last = rows
        except BaseException as error:
            self.error = error


@contextmanager
def traffic(addresses: list[str]) -> Iterator[list[Counter]]:
    """Counting clients and a reader; afterwards the table has what they were told it has."""
    counters = [Counter(addresses, seed) for seed in range(2)]
    everybody = [*counters, Reader(addresses)]
    for thread in everybody:
        thread.start()
    try:
        yield counters
    finally:
        for thread in everybody:
            thread.ended.set()
        for thread in everybody:
            thread.join(90)
            assert not thread.is_alive()
            assert thread.error is None, thread.error
    rows = counters[0].client.pull("t", KEYS)
    np.testing.assert_array_equal(rows[:, 0], sum(c.counts for c in counters))
    assert (rows == rows[:, :1]).all()
    for thread in everybody:
        thread.client.close()


def _more(counters: list[Counter], pushes: int = 3) -> None:
    goals = [c.pushes + pushes for c in counters]

    def reached() -> bool:
        assert all(c.error is None for c in counters), [c.error for c in counters]
        return all(c.pushes >= goal for c, goal in zip(counters, goals, strict=True))

    wait_until(reached, "more pushes", 90.0, pause_s=0.01)


def _kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


@rounds("kills", few=2, many=10)
def test_shards_with_a_log_are_killed(tmp_path: Path, kills: int) -> None:
    """At rest, during saves, during reshards; rows lie in memory and on disk."""
    chance = random.Random(7)
    options = ("--fold", "1")
    with (
        LocalShards(2, supervised=True, options=options) as shards,
        ParameterClient(shards.addresses, timeout_s=20) as client,
    ):
        _make(client, "log", memory_bytes=1 << 16)
        a, b = shards.addresses
        c = shards.add()
        saves = 0
        wanted = [[a, b], [a, b, c]]
        with traffic([a, b]) as counters:
            for number in range(kills):
                victim = shards.processes[chance.randrange(3)].pid
                timer = threading.Timer(chance.uniform(0, 0.15), _kill, (victim,))
                timer.start()
                try:
                    if number % 3 == 1:
                        client.save(tmp_path / "ck", timeout_s=20)
                        saves += 1
                    elif number % 3 == 2:
                        client.reshard(wanted[number // 3 % 2 - 1], timeout_s=20)
                except (ShardError, CheckpointError):
                    pass  # it says so, and can be repeated
                timer.join()
                _more(counters)
            for _ in range(5):
                try:
                    client.reshard([a, b, c], timeout_s=20)
                    break
                except ShardError:
                    time.sleep(0.5)
            else:
                raise AssertionError("a reshard cannot be finished")
            client.save(tmp_path / "ck")
        rows = client.pull("t", KEYS)
        assert (LocalTable.load_checkpoint(tmp_path / "ck")["t"].pull(KEYS) <= rows).all()
        assert sum(t.disk_rows for s in client.stats() for t in s.tables) > 0


def filled(shards: LocalShards) -> None:
    """Wait until every replica that was restarted has its shard's rows again."""
    for replica in shards.replicas:
        with connect(replica.address) as channel:
            stub = ParameterServerStub(channel)

            def filled(stub: ParameterServerStub = stub) -> bool:
                reply: pb.StatsReply = call(
                    stub.Stats, pb.StatsRequest(), what="replica", timeout_s=5, retry_s=60
                )
                return any(t.rows for t in reply.tables)

            wait_until(filled, "a replica is filled", 60.0)


@rounds("kills", few=2, many=10)
def test_shards_and_replicas_are_killed(kills: int) -> None:
    chance = random.Random(8)
    with (
        LocalShards(2, replicas=True, supervised=True) as shards,
        ParameterClient(shards.addresses, timeout_s=60) as client,
    ):
        _make(client, "replica")
        with traffic(shards.addresses) as counters:
            _more(counters)
            for _ in range(kills):
                filled(shards)  # one of a pair may die at a time
                processes = chance.choice([shards.processes, shards.replicas])
                time.sleep(chance.uniform(0, 0.05))
                victim = chance.choice(processes)
                _kill(victim.pid)
                victim.process.wait()
                wait_until(
                    lambda: all(c.poll() is None for c in (*shards.processes, *shards.replicas)),
                    "all run again",
                    60.0,
                )
                _more(counters)
            filled(shards)


# Forwards calls, byte for byte, by gRPC and by streams, and does what networks do.
_PROXY = """
import random, socket, struct, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from protos.parameter_server_pb2 import AttachReply

target, seed = sys.argv[1], int(sys.argv[2])
chance, lock = random.Random(seed), threading.Lock()
options = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
channel = grpc.insecure_channel(target, options)
counts = dict(lost=0, dropped=0, doubled=0, delayed=0)

def draw():
    with lock:
        return chance.random()

HEAD = struct.Struct("!BQ")

def whole(connection, size):
    got = b""
    while len(got) < size:
        more = connection.recv(size - len(got))
        if not more:
            raise ConnectionError
        got += more
    return got

def reach(port, secret):
    there = socket.create_connection((target.rpartition(":")[0], port), 10)
    there.sendall(secret)
    return there, whole(there, 1)

def exchange(there, message):
    there.sendall(message)
    head = whole(there, HEAD.size)
    return head + whole(there, HEAD.unpack(head)[1])

def again(port, secret, message):
    try:
        exchange(reach(port, secret)[0], message)
    except OSError:
        pass

def carry(here, port):
    with here:
        try:
            secret = whole(here, 32)
            there, let_in = reach(port, secret)
            here.sendall(let_in)
            while True:
                head = whole(here, HEAD.size)
                message = head + whole(here, HEAD.unpack(head)[1])
                fate = draw()
                if fate < 0.10:
                    counts["lost"] += 1
                    there.close()
                    return
                if fate < 0.20:
                    counts["doubled"] += 1
                    threading.Timer(draw() * 0.3, again, (port, secret, message)).start()
                if 0.20 <= fate < 0.35:
                    counts["delayed"] += 1
                    time.sleep(draw() * 0.05)
                reply = exchange(there, message)
                if 0.35 <= fate < 0.50:
                    counts["dropped"] += 1
                    there.close()
                    return
                here.sendall(reply)
        except OSError:
            pass

relays = {}

def relay(port):
    with lock:
        if port not in relays:
            taking = socket.create_server(("127.0.0.1", 0))
            def take():
                while True:
                    here, _ = taking.accept()
                    threading.Thread(target=carry, args=(here, port), daemon=True).start()
            threading.Thread(target=take, daemon=True).start()
            relays[port] = taking.getsockname()[1]
        return relays[port]

class Forward(grpc.GenericRpcHandler):
    def service(self, details):
        method = channel.unary_unary(details.method)
        harmed = details.method.rpartition("/")[2] in ("Push", "Pull", "Stage", "Tally", "Commit")

        def one(request, context):
            fate = draw() if harmed else 1.0
            if fate < 0.10:
                counts["lost"] += 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the request was lost")
            if fate < 0.20:
                counts["doubled"] += 1
                late = threading.Timer(draw() * 0.3, lambda: method.future(request, timeout=10))
                late.start()
            if 0.20 <= fate < 0.35:
                counts["delayed"] += 1
                time.sleep(draw() * 0.05)
            try:
                reply = method(request, timeout=30)
            except grpc.RpcError as error:
                context.abort(error.code(), error.details())
            if 0.35 <= fate < 0.50:
                counts["dropped"] += 1
                context.abort(grpc.StatusCode.UNAVAILABLE, "the reply was lost")
            if details.method.endswith("/Attach"):
                there = AttachReply.FromString(reply)
                if there.stream_port:
                    there.stream_port = relay(there.stream_port)
                return there.SerializeToString()
            return reply

        return grpc.unary_unary_rpc_method_handler(one)

server = grpc.server(ThreadPoolExecutor(32), handlers=(Forward(),), options=options)
print(server.add_insecure_port("127.0.0.1:0"), flush=True)
server.start()
sys.stdin.readline()
time.sleep(0.5)
server.stop(1).wait()
import json
print(json.dumps(counts), flush=True)
"""


@contextmanager
def bad_network(shards: list[str]) -> Iterator[list[str]]:
    """Addresses by which calls to these are lost, repeated and delayed; each of that happens."""
    proxies = [
        subprocess.Popen(
            [sys.executable, "-c", _PROXY, address, str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed, address in enumerate(shards)
    ]
    try:
        yield [f"127.0.0.1:{int(_line(p))}" for p in proxies]
    finally:
        found = []
        for proxy in proxies:
            assert proxy.stdin is not None
            proxy.stdin.write("\n")
            proxy.stdin.flush()
            found.append(json.loads(_line(proxy)))
            proxy.wait(10)
    assert all(count > 0 for counts in found for count in counts.values()), found


@pytest.mark.parametrize("streams", [True, False])
@pytest.mark.parametrize("wire", ["float32", *more("bfloat16")])
def test_a_bad_network_changes_nothing(wire: str, streams: bool) -> None:
    rng = np.random.default_rng(3)
    steps = [
        (rng.choice(500, 80, replace=False), rng.integers(-8, 8, (80, 4)).astype(np.float32))
        for _ in range(60)
    ]
    with (
        LocalShards(2) as shards,
        bad_network(shards.addresses) as addresses,
        ParameterClient(addresses, shared_memory=False, streams=streams, wire=wire) as client,
        ParameterClient(shards.addresses, wire=wire) as straight,
    ):
        # Momentum: a step that is missing, doubled or out of order would show.
        how = {"optimizer": "momentum", "learning_rate": 0.125, "initializer": "zeros"}
        straight.create_table("bad", 4, **how)
        straight.create_table("good", 4, **how)
        for keys, grads in steps:
            client.push("bad", keys, grads)
            straight.push("good", keys, grads)
        keys = np.arange(500)
        good = straight.pull("good", keys)
        np.testing.assert_array_equal(client.pull("bad", keys), good)
        # Many at a time, in no order: sums do not mind.
        plain = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
        straight.create_table("sum", 4, **plain)
        for future in [client.push_async("sum", k, g) for k, g in steps]:
            future.result(60)
        total = np.zeros((500, 4), np.float32)
        for k, g in steps:
            total[k] -= g
        np.testing.assert_array_equal(straight.pull("sum", keys), total)


def _line(process: "subprocess.Popen[str]") -> str:
    assert process.stdout is not None
    return process.stdout.readline()
