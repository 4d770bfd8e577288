"""Sums among a stage's workers: exact, in the order of ranks, on one host as over several."""

import contextlib
import socket
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
import torch

from chassis.channels import RpcError, connect
from chassis.security import Security
from heterps.home import certs
from protos.stage_pb2 import JoinRequest
from protos.stage_pb2_grpc import StageStub
from workers.errors import PeerLostError
from workers.links.all_reduce import Rendezvous, StageGroup, processes_allowed
from workers.links.inbox import Inbox, Stopped
from workers.links.ring import (
    _PART,
    _SUM,
    SEGMENT,
    BucketId,
    Ring,
    Section,
    SumError,
    _Message,
)
from workers.links.ring_port import RingPort, join_stage, local_rings
from workers.links.service import StageService
from workers.links.session import Session

CPU = torch.device("cpu")
HERE, THERE = "127.0.0.1", "127.0.0.2"  # two hosts, as far as names go
DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.uint8),
]
# Empty, a scalar, odd sizes, some that fill buckets together, one of several buckets' segments.
SHAPES = [
    (0,),
    (),
    (1,),
    (3, 0, 2),
    (7, 3),
    (1000, 130),
    (1000, 131),
    (2 * SEGMENT // 4 + 3,),
    (5,),
]


@pytest.fixture
def stop():
    event = threading.Event()
    yield event
    event.set()


@pytest.fixture
def make(stop):
    """Makes the groups of some workers that are threads."""
    made = []

    def groups(size, **options):
        made.extend(StageGroup(CPU, ring) for ring in local_rings(size, stop.is_set, **options))
        return made[-size:]

    yield groups
    together(made, StageGroup.close)


def together(groups, work):
    if not groups:
        return []
    with ThreadPoolExecutor(len(groups)) as pool:
        return list(pool.map(work, groups, timeout=60))


def summed(group, tensors):
    total = group.begin_sum(0)
    total.add(tensors)
    total.wait()


def values(shape, dtype, generator):
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype) * 3
    return torch.randint(0, 40, shape, generator=generator).to(dtype)


def given_to(size, dtypes=DTYPES):
    """What each rank adds: every dtype in every shape, dtypes in turn."""
    generator = torch.Generator().manual_seed(size)
    shapes = [(shape, dtype) for shape in SHAPES for dtype in dtypes]
    return [[values(*pair, generator) for pair in shapes] for _ in range(size)]


def in_the_order_of_ranks(given):
    total = [tensor.clone() for tensor in given[0]]
    for more in given[1:]:
        for tensor, other in zip(total, more, strict=True):
            tensor.add_(other)
    return total


@pytest.mark.parametrize("size", [2, 3, 4, 5])
def test_every_element_is_summed_in_its_dtype_in_the_order_of_ranks(make, size):
    given = given_to(size)

    def work(group):
        tensors = [tensor.clone() for tensor in given[group.rank]]
        tensors[5] = tensors[5].t().contiguous().t()  # does not lie in order
        total = group.begin_sum(0)
        total.add(tensors[:4])
        total.add(tensors[4:])
        total.wait()
        return tensors

    expected = in_the_order_of_ranks(given)
    for tensors in together(make(size), work):
        for tensor, sum_ in zip(tensors, expected, strict=True):
            assert tensor.dtype == sum_.dtype
            assert torch.equal(tensor, sum_)


def test_float64_keeps_what_float32_loses(make):
    def work(group):
        loss = torch.tensor(1.0 + group.rank * 1e-12, dtype=torch.float64)
        count = torch.tensor(2**53 + group.rank)  # which no double holds
        (sum_, total) = group.sum_gradients([], [loss, count])
        return sum_.item(), total.item()

    exact = 1.0 + (1.0 + 1e-12)
    assert together(make(2), work) == [(exact, 2**54 + 1)] * 2


def test_many_steps_are_open_and_begun_by_each_worker_in_an_order_of_its_own(make):
    steps, size = 4, 3
    given = [given_to(size, [torch.float32]) for _ in range(steps)]
    for step, tensors in enumerate(given):
        for rank in range(size):
            for tensor in tensors[rank]:
                tensor.add_(step)

    def work(group):
        mine = [[tensor.clone() for tensor in given[step][group.rank]] for step in range(steps)]
        totals = [group.begin_sum(step) for step in range(steps)]
        order = torch.randperm(steps, generator=torch.Generator().manual_seed(group.rank)).tolist()
        for step in order:
            totals[step].add(mine[step][:5])
        for step in reversed(order):
            totals[step].add(mine[step][5:])
        for total in totals:
            total.wait()
        return mine

    for mine in together(make(size), work):
        for step, tensors in enumerate(mine):
            expected = in_the_order_of_ranks(given[step])
            assert all(map(torch.equal, tensors, expected))


def test_gradients_and_the_loss_are_summed_in_the_order_of_ranks(make):
    size = 3
    torch.manual_seed(0)
    given = [[torch.randn(4, 3), torch.randn(5)] for _ in range(size)]

    def work(group):
        parameters = [torch.nn.Parameter(torch.zeros_like(g)) for g in given[group.rank]]
        for parameter, gradient in zip(parameters, given[group.rank], strict=True):
            parameter.grad = gradient.clone()
        mine = [torch.tensor(float(group.rank + 1)), torch.tensor(0.5, dtype=torch.float64)]
        sums = [group.sum_gradients(parameters, mine) for _ in range(2)]
        return sums, [p.grad for p in parameters]

    for sums, gradients in together(make(size), work):
        assert sums == [[6.0, 1.5], [6.0, 1.5]]
        for index, gradient in enumerate(gradients):
            once = (given[0][index] + given[1][index]) + given[2][index]
            assert torch.equal(gradient, (once + once) + once)


def test_parameters_values_and_meetings(make):
    odd = torch.tensor([float("nan"), -0.0, 1e-40])

    def work(group):
        weight = torch.nn.Parameter(torch.full((2, 2), float(group.rank + 5)))
        bits = torch.nn.Parameter(odd.clone() if group.rank == 0 else torch.ones(3))
        group.share_parameters([weight, bits])
        group.barrier()
        rows = group.gather(torch.arange(group.rank + 1, dtype=torch.float32)[:, None])
        flags = group.gather(torch.tensor([group.rank == 1]))
        found = group.any(group.rank == 2), group.any(False)
        return weight.data, bits.data, rows, flags, found

    for weight, bits, rows, flags, found in together(make(3), work):
        assert torch.equal(weight, torch.full((2, 2), 5.0))
        assert torch.equal(bits.view(torch.int32), odd.view(torch.int32))
        assert rows.flatten().tolist() == [0, 0, 1, 0, 1, 2]
        assert flags.tolist() == [False, True, False]
        assert found == (True, False)


@pytest.mark.parametrize(
    ("mine", "other"),
    [
        ([torch.ones(2)], [torch.ones(3)]),
        ([torch.ones(2)], [torch.ones(2, dtype=torch.float64)]),
        ([torch.ones(2)], []),
        ([torch.ones(SEGMENT)], [torch.ones(SEGMENT), torch.ones(SEGMENT)]),
    ],
    ids=["size", "dtype", "nothing", "more"],
)
def test_workers_that_add_other_tensors_are_told(make, mine, other):
    def work(group):
        tensors = [tensor.clone() for tensor in (mine if group.rank == 0 else other)]
        with pytest.raises((SumError, PeerLostError)) as raised:
            summed(group, tensors)
        return raised.type, str(raised.value)

    told = together(make(2), work)
    assert any(kind is SumError and "expected the same of all" in text for kind, text in told), told


def test_what_cannot_be_summed_is_refused(make):
    (group, _) = make(2)
    with pytest.raises(SumError, match=r"torch\.bool cannot be summed; expected one of float32"):
        summed(group, [torch.tensor([True])])


def test_who_leaves_is_missed_at_once_by_those_who_wait(make):
    groups = make(4)

    def work(group):
        if group.rank == 2:
            group.barrier()
            group.close()
            return None
        group.barrier()
        with pytest.raises(PeerLostError, match=r"worker \d of the stage"):
            group.barrier()
        return group.rank

    assert together(groups, work) == [0, 1, None, 3]


def test_all_leave_after_a_last_meeting(make):
    for _ in range(20):

        def work(group):
            group.barrier()
            group.close()

        together(make(5), work)


def test_a_worker_that_says_nothing_is_missed(make):
    (first, second) = make(2, silence_s=3)  # signs of life come each second
    second._ring._writer.close()  # it sends no sign of life any more
    with pytest.raises(PeerLostError, match="worker 1 of the stage: no sign of life for 3 s"):
        first.barrier()
    with pytest.raises(PeerLostError):
        second.barrier()
    for group in (first, second):
        with pytest.raises(PeerLostError):
            group.check()  # nobody has to wait for a sum to hear of it


def test_waiting_ends_with_the_process(make, stop):
    (group, _) = make(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(group.barrier)
        stop.set()
        with pytest.raises(Stopped):
            waiting.result(60)


# Who is let in


@pytest.fixture
def secured(tmp_path, monkeypatch):
    """The cluster's files in the environment; the certificate names both hosts."""
    certs.make(tmp_path, [HERE, THERE])
    for name, value in certs.environment(tmp_path).items():
        monkeypatch.setenv(name, value)


class Workers:
    """Stage services on these hosts, as many workers of one stage."""

    def __init__(self, hosts):
        self.stop = threading.Event()
        self.ports = [RingPort(rank, len(hosts), host) for rank, host in enumerate(hosts)]
        self.services = [StageService(Session(Inbox(self.stop), port)) for port in self.ports]
        for service, host in zip(self.services, hosts, strict=True):
            service.serve(f"{host}:0")
        self.addresses = [service.address for service in self.services]

    def groups(self):
        def join(port):
            return StageGroup(CPU, join_stage(port, self.addresses, self.stop.is_set))

        return together(self.ports, join)

    def close(self):
        self.stop.set()
        for port in self.ports:
            port.close()
        for service in self.services:
            service.stop(0.1)


@pytest.fixture
def workers():
    made = []

    def start(*hosts):
        made.append(Workers(hosts))
        return made[-1]

    yield start
    for each in made:
        each.close()


@pytest.mark.parametrize("hosts", [(HERE, HERE), (HERE, THERE, HERE), (HERE, THERE)])
def test_workers_of_several_hosts_meet_under_tls_and_token(secured, workers, hosts):
    groups = workers(*hosts).groups()
    speak_tls = [isinstance(group._ring._after, ssl.SSLSocket) for group in groups]
    after = (*hosts[1:], hosts[0])
    assert speak_tls == [here != there for here, there in zip(hosts, after, strict=True)]
    given = given_to(len(hosts), [torch.float32])

    def work(group):
        tensors = [tensor.clone() for tensor in given[group.rank]]
        total = group.begin_sum(7)
        total.add(tensors)
        total.wait()
        group.close()
        return tensors

    for tensors in together(groups, work):
        assert all(map(torch.equal, tensors, in_the_order_of_ranks(given)))


def test_who_has_no_token_is_not_told_where_to_connect(secured, workers, monkeypatch):
    (address, _) = workers(HERE, HERE).addresses
    monkeypatch.delenv("HETERPS_TOKEN_FILE")
    with connect(address) as channel, pytest.raises(grpc.RpcError) as caught:
        StageStub(channel).Join(JoinRequest(rank=1, size=2), timeout=10)
    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED


def intrusions(port):
    """Connections of one who knows where, and not the secret; each sends what it would."""
    reply = port.admit(JoinRequest(rank=1, size=2))
    near = socket.socket(socket.AF_UNIX)
    near.connect(f"\0{reply.name}")
    yield near, b"x" * 32
    where = HERE, int(reply.address.rpartition(":")[2])
    yield socket.create_connection(where), reply.secret  # not under TLS
    context = Security.from_environment().tls_client()
    far = context.wrap_socket(socket.create_connection(where), server_hostname=HERE)
    yield far, reply.secret[:-1] + bytes([reply.secret[-1] ^ 1])


def test_who_connects_without_the_secret_is_sent_away(secured, workers):
    started = workers(HERE, HERE)
    for connection, word in intrusions(started.ports[0]):
        connection.settimeout(60)
        connection.sendall(word)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1) in (b"", b"\x15")  # the end, or an alert of TLS
        connection.close()
    groups = started.groups()
    assert together(groups, lambda group: group.any(group.rank == 0)) == [True, True]
    together(groups, StageGroup.close)


def test_a_worker_of_another_place_is_refused(workers):
    started = workers(HERE, HERE)
    with connect(started.addresses[0]) as channel, pytest.raises(grpc.RpcError) as caught:
        StageStub(channel).Join(JoinRequest(rank=2, size=3), timeout=10)
    assert "expected worker 1 of 2" in caught.value.details()
    alone = StageService(Session(Inbox(threading.Event())))
    alone.serve(f"{HERE}:0")
    with pytest.raises(RpcError, match="alone in its stage"):
        join_stage(started.ports[0], [HERE, alone.address], lambda: False)
    alone.stop(0.1)


def test_a_next_worker_that_is_gone(workers):
    started = workers(HERE, HERE)
    reply = started.ports[1].admit(JoinRequest(rank=0, size=2))
    started.ports[1].close()
    with pytest.raises(PeerLostError, match="worker 1 of the stage"):
        started.ports[0].join(reply, HERE, lambda: False)


def test_the_store_listens_on_loopback_alone(monkeypatch):
    monkeypatch.delenv("HETERPS_PLAIN_COLLECTIVES", raising=False)
    store = Rendezvous("192.0.2.1")  # an address that is not ours: it would fail
    assert store.address.startswith("127.0.0.1:")
    port = int(store.address.rpartition(":")[2])
    with open("/proc/net/tcp") as four, open("/proc/net/tcp6") as six:
        lines = [line.split() for line in (*four, *six)]
    bound = [w[1] for w in lines if w[3] == "0A" and w[1].endswith(f":{port:04X}")]
    assert bound == [f"0100007F:{port:04X}"]


def test_where_collectives_of_torch_may_be_used():
    here, far = "127.0.0.1:1", "192.0.2.1:1"
    assert processes_allowed(["a:1", "a:2"], here)
    assert processes_allowed(["a:1", "b:1"], far)
    assert not processes_allowed(["a:1", "b:1", "[::1]:3"], here)


# What is no segment


class Wire:
    """Rank 1 of three, whose neighbours are the test."""

    def __init__(self, rank=1, size=3):
        self.before, ours = socket.socketpair()
        theirs, self.after = socket.socketpair()
        self.ring = Ring(rank, size, ours, theirs, lambda: False)
        self.values = torch.ones(2 * SEGMENT // 4 + 1)  # two segments and four bytes
        section = Section(torch.float32, self.values.nbytes)
        values = self.values.view(torch.uint8)
        self.bucket = self.ring.begin(BucketId(0, 0), values, [section], last=False)

    def send(self, kind, offset, length, number=0):
        payload = torch.empty(length, dtype=torch.uint8, device="meta")
        head = _Message(kind, BucketId(0, number), self.bucket.shape, offset, payload).head()
        self.before.sendall(head)
        threading.Thread(target=self._send_payload, args=(length,), daemon=True).start()

    def _send_payload(self, length):
        with contextlib.suppress(OSError):
            self.before.sendall(bytes(length))

    def close(self):
        self.ring.close()
        self.before.close()
        self.after.close()


@pytest.mark.parametrize("kind", [_PART, _SUM])
@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (4, SEGMENT),  # between segments
        (0, SEGMENT - 4),
        (0, 2 * SEGMENT),
        (2 * SEGMENT, SEGMENT),  # beyond the end
        (3 * SEGMENT, 4),
        (1 << 62, SEGMENT),
    ],
)
def test_what_is_no_segment_of_a_sum_ends_the_ring(kind, offset, length):
    wire = Wire()
    wire.send(kind, offset, length)
    with pytest.raises(PeerLostError, match=f"{length} bytes at {offset} of float32"):
        wire.ring.wait(wire.bucket)
    assert torch.equal(wire.values, torch.ones_like(wire.values))
    wire.close()


@pytest.mark.parametrize(
    ("rank", "kind", "number"), [(0, _PART, 0), (2, _SUM, 0), (1, _SUM, 1), (1, 9, 0)]
)
def test_what_nobody_sends_ends_the_ring(rank, kind, number):
    wire = Wire(rank)
    wire.send(kind, 0, SEGMENT, number=number)
    with pytest.raises(PeerLostError, match=r"of kind|that nobody asked for"):
        wire.ring.wait(wire.bucket)
    wire.close()


@pytest.mark.parametrize(("rank", "kind"), [(1, _SUM), (2, _PART)])
def test_a_segment_counts_once(rank, kind):
    wire = Wire(rank)
    wire.send(kind, 2 * SEGMENT, 4)
    while 2 * SEGMENT in wire.bucket.missing:
        time.sleep(0.001)
    wire.send(kind, 2 * SEGMENT, 4)
    with pytest.raises((PeerLostError, SumError), match=r"nobody asked for|twice"):
        wire.ring.wait(wire.bucket)
    wire.close()
