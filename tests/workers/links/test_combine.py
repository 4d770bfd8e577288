"""Sums among workers of several hosts: what torch.distributed would give, over gRPC."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from chassis.channels import RpcError, connect
from protos.stage_pb2 import SUM, Part
from protos.stage_pb2_grpc import StageStub
from workers.errors import PeerLostError
from workers.links.all_reduce import Rendezvous, StageGroup
from workers.links.combine import CombineError, Combiner, Hub, hosts_of
from workers.links.inbox import Inbox
from workers.links.transport import StageService

SIZE = 3
CPU = torch.device("cpu")


@pytest.fixture
def stop():
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def groups(stop):
    """The group of each of three workers, the first of which serves the others."""
    hub = Hub(SIZE, stop.is_set)
    server = StageService(Inbox(stop), hub).serve("127.0.0.1:0", threads=SIZE)
    combiners = [
        Combiner(rank, server.address, None if rank else hub, stop.is_set) for rank in range(SIZE)
    ]
    yield [StageGroup(r, SIZE, "", None, CPU, combiner) for r, combiner in enumerate(combiners)]
    for combiner in combiners:
        combiner.close()
    server.stop(0.1)


def together(groups, work):
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, groups, timeout=60))


def test_gradients_and_the_loss_are_summed_in_the_order_of_ranks(groups):
    torch.manual_seed(0)
    given = [[torch.randn(4, 3), torch.randn(5)] for _ in range(SIZE)]

    def work(group):
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in given[group.rank]]
        for parameter, gradient in zip(parameters, given[group.rank], strict=True):
            parameter.grad = gradient.clone()
        mine = [torch.tensor(float(group.rank + 1)), torch.tensor(0.5, dtype=torch.float64)]
        sums = [group.sum_gradients(parameters, mine) for _ in range(2)]
        return sums, [p.grad for p in parameters]

    results = together(groups, work)
    for sums, gradients in results:
        assert sums == [[6.0, 1.5], [6.0, 1.5]]
        for index, gradient in enumerate(gradients):
            once = (given[0][index] + given[1][index]) + given[2][index]
            assert torch.equal(gradient, (once + once) + once)


def test_parameters_values_and_meetings(groups):
    def work(group):
        parameter = torch.nn.Parameter(torch.full((2, 2), float(group.rank + 5)))
        group.share_parameters([parameter])
        group.barrier()
        rows = group.gather(torch.arange(group.rank + 1, dtype=torch.float32)[:, None])
        return parameter.data, rows

    for parameter, rows in together(groups, work):
        assert torch.equal(parameter, torch.full((2, 2), 5.0))
        assert rows.flatten().tolist() == [0, 0, 1, 0, 1, 2]


def test_a_repeated_part_counts_once_and_gets_the_same_answer(stop):
    hub = Hub(2, stop.is_set)
    one, two = torch.ones(2).numpy(), torch.full((2,), 2.0).numpy()
    with ThreadPoolExecutor(3) as pool:
        calls = [pool.submit(hub.combine, 1, 1, SUM, two) for _ in range(2)]
        calls.append(pool.submit(hub.combine, 1, 0, SUM, one))
        assert [call.result(30).tolist() for call in calls] == [[3.0, 3.0]] * 3
    assert hub.combine(1, 1, SUM, two).tolist() == [3.0, 3.0]


def test_workers_that_do_not_fit_are_told(stop):
    hub = Hub(2, stop.is_set)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(hub.combine, 1, 0, SUM, torch.ones(2).numpy())
        while 1 not in hub._open:
            time.sleep(0.01)
        with pytest.raises(CombineError, match=r"worker 1 brings float32\[3\].*float32\[2\]"):
            hub.combine(1, 1, SUM, torch.ones(3).numpy())
        with pytest.raises(CombineError, match="rank 2: expected 0 to 1"):
            hub.combine(1, 2, SUM, torch.ones(2).numpy())
        stop.set()
        with pytest.raises(PeerLostError, match="stopped"):
            waiting.result(10)


def test_what_is_no_part_is_refused(stop):
    server = StageService(Inbox(stop), Hub(2, stop.is_set)).serve("127.0.0.1:0", threads=2)
    try:
        with connect(server.address) as channel:
            with pytest.raises(grpc.RpcError) as caught:
                StageStub(channel).Combine(Part(sequence=1, payload=b"x"), timeout=10)
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        combiner = Combiner(9, server.address, None, stop.is_set)
        with pytest.raises(RpcError, match="rank 9: expected 0 to 1"):
            combiner.meet()
        combiner.close()
    finally:
        server.stop(0.1)


def test_the_store_listens_on_loopback_alone(monkeypatch):
    monkeypatch.delenv("HETERPS_PLAIN_COLLECTIVES", raising=False)
    store = Rendezvous("192.0.2.1")  # an address that is not ours: it would fail
    assert store.address.startswith("127.0.0.1:")
    port = int(store.address.rpartition(":")[2])
    with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
        lines = [line.split() for line in (*four, *six)]
    bound = [w[1] for w in lines if w[3] == "0A" and w[1].endswith(f":{port:04X}")]
    assert bound == [f"0100007F:{port:04X}"]


def test_hosts_are_told_apart():
    assert hosts_of(["a:1", "a:2"]) == {"a"}
    assert hosts_of(["a:1", "b:1", "[::1]:3"]) == {"a", "b", "[::1]"}
