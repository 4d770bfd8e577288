"""A client that is aborted waits for no shard any more, whatever it had asked it for."""

import os
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import grpc
import numpy as np
import pytest

from ps import LocalShards, ParameterClient, ShardError
from tests.pids import stop

KEYS = np.arange(64)
GRADS = np.ones((64, 2), np.float32)
FOREVER_S = 600.0


def begun(call: Callable[[], object]) -> "Future[object]":
    """What a call on a thread of its own comes to; it is under way."""
    result: Future[object] = Future()
    started = threading.Event()

    def run() -> None:
        started.set()
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    started.wait()
    return result


@pytest.mark.parametrize(
    ("how", "shared_memory"), [(signal.SIGSTOP, True), (signal.SIGKILL, False)]
)
def test_no_call_waits_for_a_shard_that_does_not_answer(
    tmp_path: Path, how: signal.Signals, shared_memory: bool
) -> None:
    with LocalShards(2) as shards:
        client, idle = (
            ParameterClient(shards.addresses, timeout_s=FOREVER_S, shared_memory=shared_memory)
            for _ in range(2)
        )
        client.create_table("t", 2)
        client.push("t", KEYS, GRADS)
        client.pull("t", KEYS)
        client.stage_async("t.series", 0, 0, {"t": (KEYS, GRADS)}).result()
        victim = shards.processes[1].pid
        stop(victim)
        if how is signal.SIGKILL:
            os.kill(victim, how)
        calls: list[Future[object]] = [
            begun(lambda: client.pull("t", KEYS)),
            begun(lambda: client.push("t", KEYS, GRADS)),
            begun(lambda: client.save(tmp_path / "save")),
            begun(lambda: client.tally("t.series", 0, 1)),
            begun(lambda: client.commit_async("t.series", 0, 1).result()),
        ]
        assert not any(call.done() for call in calls)
        client.abort()
        for call in [*calls, begun(lambda: client.pull("t", KEYS))]:
            error = call.exception(timeout=60)
            assert isinstance(error, ShardError)
            assert error.code is grpc.StatusCode.CANCELLED
        client.close()
        idle.abort()
        idle.abort()
        with pytest.raises(RuntimeError, match="closed"):
            idle.pull("t", KEYS)
        with suppress(ProcessLookupError):
            os.kill(victim, signal.SIGKILL)


def test_one_that_is_being_closed_waits_no_more_either() -> None:
    with LocalShards(2) as shards:
        client = ParameterClient(shards.addresses, timeout_s=FOREVER_S, shared_memory=False)
        client.create_table("t", 2)
        client.push("t", KEYS, GRADS)
        stop(shards.processes[1].pid)
        pulled = client.pull_async("t", KEYS)
        closed = begun(client.close)
        with pytest.raises(TimeoutError):
            closed.result(timeout=0.5)
        client.abort()
        closed.result(timeout=60)
        assert isinstance(pulled.exception(timeout=60), ShardError)
        os.kill(shards.processes[1].pid, signal.SIGKILL)
