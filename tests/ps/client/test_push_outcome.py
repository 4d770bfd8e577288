"""Pushes whose end is not known, and what must not travel as float16."""

import os
import signal
import threading
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from chassis.servers import TENSOR_BYTES, Server
from protos.parameter_server_pb2_grpc import add_ParameterServerServicer_to_server
from ps import LocalShards, OutcomeUnknownError, ParameterClient, ShardError, TableError
from ps.errors import NonFiniteError
from ps.server.service import ParameterService
from ps.shard.state import ShardState
from tests.pids import stop
from tests.waiting import wait_until

TABLE = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
KEYS = np.arange(300)
ONES = np.full((300, 2), -1, np.float32)  # adds 1
BOTH_WAYS = pytest.mark.parametrize("shared_memory", [True, False])


@pytest.fixture(scope="module")
def running() -> Iterator[LocalShards]:
    with LocalShards(2) as shards:
        yield shards


@pytest.fixture
def pair(running: LocalShards) -> Iterator[LocalShards]:
    yield running
    with ParameterClient(running.addresses) as client:
        client.drop_tables("t")


def _push(client: ParameterClient, background: bool) -> None:
    values = ONES.copy()
    if background:
        future = client.push_async("t", KEYS, values)
        values[:] = 77  # the caller's again
        future.result(60)
    else:
        client.push("t", KEYS, values)


@BOTH_WAYS
@pytest.mark.parametrize("background", [False, True])
def test_a_push_that_ended_by_timeout_is_sent_again_as_what_it_was(
    pair: LocalShards, shared_memory: bool, background: bool
) -> None:
    """One shard has applied its part, the other was stopped: it begins nothing afterwards."""
    with (
        ParameterClient(pair.addresses, timeout_s=1, shared_memory=shared_memory) as client,
        ParameterClient(pair.addresses) as other,
    ):
        client.create_table("t", 2, **TABLE)
        client.push("t", KEYS, ONES)
        pid = pair.processes[0].pid
        stop(pid)
        try:
            with pytest.raises(OutcomeUnknownError, match=r"did not answer .*not known") as caught:
                _push(client, background)
            with pytest.raises(OutcomeUnknownError) as again:
                caught.value.retry()
        finally:
            os.kill(pid, signal.SIGCONT)
        assert caught.value.code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert caught.value.address == pair.addresses[0]
        before = set(np.unique(other.pull("t", KEYS)).tolist())
        # Nothing that was given up is begun; but gRPC may have the push begin before it reads on
        # that it was given up, where both have waited in the socket.
        assert before == {1.0, 2.0} or (before == {2.0} and not shared_memory)
        client.push("t", KEYS[:5], np.zeros((5, 2), np.float32))  # others may come between
        again.value.retry()
        assert (other.pull("t", KEYS) == 2).all()
        again.value.retry()  # nothing is left
        assert (other.pull("t", KEYS) == 2).all()


@BOTH_WAYS
def test_a_push_that_was_applied_after_its_timeout_is_not_applied_again(
    shared_memory: bool,
) -> None:
    state = ShardState()
    service = ParameterService(state)
    slow = threading.Event()
    slow.set()
    apply = state.push

    def push(*args, **kwargs):  # type: ignore[no-untyped-def]
        if slow.is_set():
            time.sleep(1.5)
        return apply(*args, **kwargs)

    state.push = push  # type: ignore[method-assign]
    server = Server("ps", most_bytes=TENSOR_BYTES)
    server.add(
        add_ParameterServerServicer_to_server,
        service,
        "heterps.v1.ParameterServer",
        raw={"Pull": service.pull, "Push": service.push},
    )
    service.unix.start()
    address = server.start()
    try:
        with ParameterClient([address], timeout_s=1, shared_memory=shared_memory) as client:
            client.create_table("t", 2, **TABLE)
            with pytest.raises(OutcomeUnknownError) as caught:
                client.push("t", KEYS, ONES)
            wait_until(lambda: client.pull("t", KEYS).min() == 1, "it is applied all the same")
            slow.clear()
            caught.value.retry()
            assert (client.pull("t", KEYS) == 1).all()
    finally:
        service.unix.close()
        server.stop(0.1)


def test_a_refusal_is_no_unknown_outcome(pair: LocalShards) -> None:
    with ParameterClient(pair.addresses) as client:
        client.create_table("t", 2, **TABLE)
        client.spec("t")
        with ParameterClient(pair.addresses) as other:
            other.drop_tables("t")
        with pytest.raises(ShardError, match="does not exist") as caught:
            client.push("t", KEYS, ONES)
        assert not isinstance(caught.value, OutcomeUnknownError)


def test_what_was_refused_is_sent_again_too(pair: LocalShards) -> None:
    """A push that is run again, as an exchange of geo mode is, succeeds once all of it has."""
    with ParameterClient(pair.addresses) as client:
        client.create_table("t", 2, **TABLE)
        push = client._push("t", KEYS, ONES.copy())
        client.drop_tables("t")
        for _ in range(2):
            with pytest.raises(ShardError, match="does not exist"):
                push.run()
        client.create_table("t", 2, **TABLE)
        push.run()
        push.run()
        assert (client.pull("t", KEYS) == 1).all()


# Float16 ends at 65504.


@pytest.mark.parametrize("value", [65504.0, -65504.0, 7e4, -3e38])
@BOTH_WAYS
def test_what_float16_cannot_carry_is_not_pushed(
    pair: LocalShards, shared_memory: bool, value: float
) -> None:
    """Of a push that one key of cannot travel, no shard gets any."""
    with (
        ParameterClient(pair.addresses, wire="float16", shared_memory=shared_memory) as client,
        ParameterClient(pair.addresses) as exact,
    ):
        client.create_table("t", 2, **TABLE)
        grads = ONES.copy()
        grads[171, 1] = value
        with pytest.raises(TableError, match=r"table 't', key 171: .*wire='float16'"):
            client.push("t", KEYS, grads)
        with pytest.raises(TableError, match=r"key 171"):
            client.stage_async("s", 1, 0, {"t": (KEYS, grads)})
        sums = np.full((300, 2), 4e4, np.float32)
        with pytest.raises(TableError, match="key 9: 80000"):  # of one key that comes twice
            client.push("t", np.full(300, 9), sums / 150)
        assert (exact.pull("t", KEYS) == 0).all()
        grads[171, 1] = 65472.0  # the largest below
        client.push("t", KEYS, grads)
        assert exact.pull("t", [171])[0].tolist() == [1.0, -65472.0]
        assert client.pull("t", [171])[0].tolist() == [1.0, -65472.0]


def test_infinity_is_no_large_number(pair: LocalShards) -> None:
    """It would travel as float16's largest, and a step that diverged would go on."""
    grads = ONES.copy()
    grads[3, 0] = np.inf
    with ParameterClient(pair.addresses, wire="float16") as client:
        client.create_table("t", 2, **TABLE)
        for call in (
            lambda: client.stage_async("s", 1, 0, {"t": (KEYS, grads)}),
            lambda: client.commit_async("s", 1, slots=1, parts={"t": (KEYS, grads)}),
        ):
            with pytest.raises(NonFiniteError, match="key 3"):
                call()


@BOTH_WAYS
def test_weights_that_float16_cannot_carry_are_not_pulled(
    pair: LocalShards, shared_memory: bool
) -> None:
    with (
        ParameterClient(pair.addresses, wire="float16", shared_memory=shared_memory) as client,
        ParameterClient(pair.addresses) as exact,
    ):
        client.create_table("t", 2, **TABLE)
        weights = np.zeros((300, 2), np.float32)
        weights[44, 0] = 7e4
        client.assign("t", KEYS, weights)
        for keys in (KEYS, KEYS[::-1].copy(), np.array([[44, 44]])):
            with pytest.raises(TableError, match="table 't', key 44: a weight"):
                client.pull("t", keys)
        with pytest.raises(TableError, match="key 44"):
            client.pull_async("t", KEYS).result(30)
        assert (client.pull("t", KEYS[45:]) == 0).all()
        assert exact.pull("t", [44])[0, 0] == 7e4
