"""Sums that begin while a backward runs: what plain PyTorch gives, whatever the model does."""

import gc
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from protos.job_pb2 import JobSpec
from workers.errors import PeerLostError
from workers.links import step_sum
from workers.links.all_reduce import StageGroup
from workers.links.ring_port import local_rings
from workers.model.code.entry import ModelError
from workers.model.module.statistics import RunningStatistics
from workers.stage.steps.schedule import Schedule
from workers.stage.update.update import Update
from workers.stage.update.versions import Versions

CPU = torch.device("cpu")
SIZE, DIM, STEPS = 3, 4, 4
LIMIT_S = 60.0  # only a hang reaches it


@pytest.fixture(autouse=True, params=[1, 100], ids=["each its bucket", "some in a bucket"])
def _small_buckets(monkeypatch, request):
    monkeypatch.setattr(step_sum, "_BUCKET", request.param)


@pytest.fixture
def groups():
    stop = threading.Event()
    made = [StageGroup(CPU, ring) for ring in local_rings(SIZE, stop.is_set)]
    yield made
    stop.set()
    together(made, StageGroup.close)


def together(groups, work):
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(work, groups, timeout=LIMIT_S))


def zero():
    return torch.zeros(1, dtype=torch.float64)


class Net(nn.Module):
    """Layers of one size; `forward` is told the step, the rank and the micro-batch."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x, step, rank, part):
        return self.d(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))


class Shuffled(Net):
    def forward(self, x, step, rank, part):
        return self.b(self.d(torch.tanh(self.a(self.c(x)))))


class Tied(Net):
    def __init__(self):
        super().__init__()
        self.d.weight = self.a.weight


class Choosy(Net):
    """What is used depends on step, worker and micro-batch; `c` in the first step alone."""

    def forward(self, x, step, rank, part):
        if (step + rank + part) % 2:
            x = torch.tanh(self.b(x))
        if rank == 1:
            x = self.d(x)
        return self.c(x) if step == 0 else x


class Frozen(Net):
    def __init__(self):
        super().__init__()
        self.b.requires_grad_(False)


class Looking(Net):
    def __init__(self):
        super().__init__()
        self.look = nn.Embedding(5, DIM, sparse=True)

    def forward(self, x, step, rank, part):
        rows = self.look(torch.tensor([step % 5, rank, part]))
        return super().forward(x, step, rank, part) + rows.sum(0)


class Again(Net):
    """Runs parts of its forward again, in backwards that the backward contains."""

    def forward(self, x, step, rank, part):
        def twice(x):
            return torch.tanh(self.c(torch.tanh(self.d(x))))

        x = checkpoint(twice, self.a(x), use_reentrant=True)
        return self.d(checkpoint(twice, x, use_reentrant=True))


class AgainInOne(Again):
    def forward(self, x, step, rank, part):
        x = checkpoint(super(Again, self).forward, x, step, rank, part, use_reentrant=False)
        return self.d(x)


class Passing(torch.autograd.Function):
    """Its backward waits for something, then passes the gradient on."""

    @staticmethod
    def forward(ctx, x, wait):
        ctx.wait = wait
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.wait()
        return gradient, None


class Waiting(Net):
    """Its first layers' backward goes on once the last gradient is the sum of all workers."""

    sums = None  # of each step, of all parameters

    def last(self):
        return self.d.bias

    def wait(self, step):
        until = time.monotonic() + LIMIT_S
        while self.sums and step and not torch.equal(self.last().grad, self.sums[step][-1]):
            assert time.monotonic() < until
            time.sleep(0.001)

    def forward(self, x, step, rank, part):
        x = torch.tanh(self.b(torch.tanh(self.a(x))))
        return self.d(Passing.apply(self.c(x), lambda: self.wait(step)))


class Sharing(Waiting):
    """The last parameter's gradient lies in memory that backward reads when it has been summed."""

    def __init__(self):
        super().__init__()
        self.tables = nn.ParameterList([torch.randn(2 * DIM)])

    def last(self):
        return self.tables[0]

    def forward(self, x, step, rank, part):
        x = self.d(self.c(torch.tanh(self.b(torch.tanh(self.a(x))))))
        return Passing.apply(x, lambda: self.wait(step)) + self.tables[0].view(2, DIM)


KINDS = [Net, Shuffled, Tied, Choosy, Frozen, Looking, Again, AgainInOne]


_seeded = threading.Lock()


def made(kind):
    with _seeded:
        torch.manual_seed(3)
        return kind()


def loss_of(model, step, rank, part):
    x = torch.randn(2, DIM, generator=torch.Generator().manual_seed(9 * step + 3 * rank + part))
    return model(x.requires_grad_(), step, rank, part).square().mean()


def parts_of(step, rank):
    """Micro-batches of a worker: none, one or two."""
    return (step + rank) % 3


def expected(kind, step, parts_of=parts_of):
    """Gradients by plain PyTorch, added in the order of ranks."""
    of_ranks = []
    for rank in range(SIZE):
        model = made(kind)
        for part in range(parts_of(step, rank)):
            loss_of(model, step, rank, part).backward()
        of_ranks.append([p.grad for p in model.parameters() if p.requires_grad])
    sums = []
    for grads in zip(*of_ranks, strict=True):
        dense = [g.to_dense() if g is not None and g.is_sparse else g for g in grads]
        some = next((g for g in dense if g is not None), None)
        filled = [torch.zeros_like(some) if g is None else g for g in dense if some is not None]
        sums.append(sum(filled[1:], filled[0]) if filled else None)
    return sums


def update_of(module, group, staleness=0):
    versions = Versions(module, staleness)
    job = JobSpec()
    job.train.optimizer.name = "sgd"
    statistics = RunningStatistics(module, group.size)
    schedule = Schedule(STEPS, lambda step: 8, 2)
    return Update(job, module, group, statistics, schedule, versions), versions


def backwards(update, model, step, rank):
    parts = parts_of(step, rank)
    for part in range(parts):
        loss = loss_of(model, step, rank, part)
        if part == parts - 1:
            update.watch(step)
        loss.backward()


def take_step(update, model, step, rank):
    """A step of one micro-batch that changes nothing; its gradients."""
    loss = loss_of(model, step, rank, 0)
    update.watch(step)
    loss.backward()
    gradient = update.gather(step, zero(), None)
    update.report(gradient)
    grads = [p.grad for p in model.parameters()]
    update.skip(gradient)
    return grads


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_plain_pytorch_to_the_bit(groups, kind, staleness):
    def work(group):
        model, sums = made(kind), []
        update, versions = update_of(model, group, staleness)
        for step in range(STEPS):
            versions.use(step)
            backwards(update, model, step, group.rank)
            gradient = update.gather(step, zero(), None)
            update.report(gradient)
            sums.append([p.grad for p in versions.parameters(step)])
            update.skip(gradient)
        return sums

    results = together(groups, work)
    for step in range(STEPS):
        wanted = expected(kind, step)
        for sums in results:
            for sum_, grad in zip(sums[step], wanted, strict=True):
                assert (sum_ is None) == (grad is None)
                assert sum_ is None or torch.equal(sum_, grad)


def test_what_has_been_closed_keeps_no_model(groups):
    def work(group):
        model = made(Net)
        update, _ = update_of(model, group, staleness=1)
        take_step(update, model, 0, group.rank)
        update.close()
        return [weakref.ref(one) for one in (update, *model.parameters())]

    known = together(groups, work)
    gc.collect()
    assert [one for refs in known for one in refs if one() is not None] == []


@pytest.mark.parametrize("_small_buckets", [1], indirect=True)  # each is summed where it lies
@pytest.mark.parametrize("kind", [Waiting, Sharing])
def test_sums_are_there_before_backward_is_over(groups, kind):
    steps = range(3)  # the first tells which gradients are complete at once
    sums = [expected(kind, step, lambda step, rank: 1) for step in steps]

    def work(group):
        model = made(kind)
        model.sums = sums
        update, _ = update_of(model, group)
        return [take_step(update, model, step, group.rank) for step in steps]

    for found in together(groups, work):
        for grads, wanted in zip(found, sums, strict=True):
            assert all(map(torch.equal, grads, wanted))


class Later(Net):
    """A parameter's gradient is accumulated several times from the second step on."""

    def forward(self, x, step, rank, part):
        return self.d(checkpoint(self.d, self.a(x), use_reentrant=True) if step else self.a(x))


def test_a_gradient_that_changes_after_it_was_added_is_no_success(groups):
    def work(group):
        model = made(Later)
        update, _ = update_of(model, group)
        take_step(update, model, 0, group.rank)
        with pytest.raises(ModelError, match=r"shape \[4\]: one backward .* several times"):
            take_step(update, model, 1, group.rank)

    together(groups, work)


def is_whole(group):
    try:
        group.check()
    except PeerLostError:
        return False
    return True


def test_a_backward_ends_where_a_worker_is_gone(groups):
    def work(group):
        model = made(Net)
        update, _ = update_of(model, group)
        take_step(update, model, 0, group.rank)
        if group.rank == 1:
            group._ring._hang_up()  # as the kernel does for one that dies
            return
        loss = loss_of(model, 1, group.rank, 0)
        update.watch(1)
        until = time.monotonic() + LIMIT_S
        while is_whole(group):
            assert time.monotonic() < until
            time.sleep(0.001)
        with pytest.raises(PeerLostError, match=r"worker \d of the stage"):
            loss.backward()

    together(groups, work)
