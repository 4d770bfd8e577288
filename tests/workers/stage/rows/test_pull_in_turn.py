"""A step's rows come along with the commit that they wait for: as if one came after the other."""

import threading

import numpy as np
import pytest
import torch
from torch import nn

from heterps import SparseEmbedding
from protos.job_pb2 import JobSpec
from protos.naming import table_prefix
from protos.stage_pb2 import COMMITTED
from ps import LocalShards, ParameterClient
from ps.client.pull_many import PullMany
from tests.waiting import wait_until
from workers.device.copies import OnHost
from workers.links.inbox import Inbox, Stopped
from workers.links.notices import NoticeBoard, Notices
from workers.links.pipeline import Place
from workers.model.chain.trace import TracedModel
from workers.model.module.inputs import inputs_of
from workers.stage.rows.ahead import StageRows
from workers.stage.rows.commits import RowCommits
from workers.stage.steps.schedule import Schedule
from workers.stage.steps.staleness import RowOrder

STEPS, DIM = 8, 2
TABLES = table_prefix("job")
LIMIT_S = 20.0  # only a hang reaches it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        options = {"optimizer": "sgd", "learning_rate": 1.0, "initializer": "zeros"}
        self.deep = SparseEmbedding("deep", DIM, **options)
        self.wide = SparseEmbedding("wide", 1, **options)

    def forward(self, sparse):
        return self.deep(sparse).sum((1, 2)) + self.wide(sparse).sum((1, 2))


class Worker:
    """The only one of its stage."""

    def __init__(self, client, staleness):
        job = JobSpec()
        job.data.sparse.append("key")
        job.data.label = "label"
        self.stop = threading.Event()
        inbox = Inbox(self.stop)
        board = NoticeBoard(inbox.wake)
        self.notices = Notices((0, 0), [["nowhere"]], board)
        schedule = Schedule(STEPS, lambda step: 8, 1)
        place = Place(0, 0, (1,))
        self.order = RowOrder(place, schedule, staleness, 0, self.notices, inbox)
        graph = TracedModel(Net(), inputs_of(job.data)).stage(0, 1)
        self.rows = StageRows(
            *(graph.module, graph.lookups, client, self.order, lambda _: 1, OnHost(), TABLES, job)
        )
        self.commits = RowCommits(
            *(self.rows, client, OnHost(), TABLES, TABLES + "series", 0, 1, staleness),
            measured=False,
        )

    def keys(self, step):
        return torch.arange(3 * step, 3 * step + 40).reshape(-1, 1)

    def distinct(self, step):
        return self.rows.distinct([{"sparse": self.keys(step)}], learning=True)

    def close(self):
        self.commits.close()
        self.rows.close()


@pytest.fixture(scope="module", params=[1, 2])
def shards(request):
    with LocalShards(request.param) as started:
        yield started


@pytest.fixture
def client(shards):
    with ParameterClient(shards.addresses, timeout_s=20) as connected:
        yield connected
        connected.drop_tables(TABLES)


@pytest.fixture
def ran(monkeypatch):
    """Of every pull that is run, whether its rows had come along."""
    found, run = [], PullMany.run

    def noted(self):
        found.append(self.ready is not None and self.ready._came)
        return run(self)

    monkeypatch.setattr(PullMany, "run", noted)
    return found


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_every_step_s_rows_have_just_the_commits_that_they_may_have(client, ran, staleness):
    worker = Worker(client, staleness)
    found = []

    def source():
        for step in range(STEPS):
            found.append(worker.rows.pull_in_turn(worker.distinct(step), step))
            worker.order.pulled(step)

    thread = threading.Thread(target=source, daemon=True)
    thread.start()
    expected = np.zeros((200, DIM), np.float32)
    history = [expected.copy()]
    for step in range(STEPS):
        wait_until(lambda step=step: len(found) > step, "its rows are here", LIMIT_S)
        # So that none is late: it goes by itself then.
        awaited = min(step + staleness, STEPS - 2)
        if step + staleness + 1 < STEPS:
            wait_until(
                lambda at=awaited - staleness: at in worker.rows._following, "it waits", LIMIT_S
            )
        pulled, keys = found[step], worker.keys(step).reshape(-1).numpy()
        seen = history[max(0, step - staleness)]
        positions = pulled.of.inverse[next(iter(pulled.of.inverse))][0].here()
        for table, dim in (("deep", DIM), ("wide", 1)):
            rows = pulled.leaf(table)
            np.testing.assert_array_equal(rows[positions].detach(), seen[keys, :dim])
            rows.grad = torch.full_like(rows, 1.0 + step)
        worker.commits.gather(step, [pulled])
        worker.commits.commit(step, 1.0, 1.0)
        expected[keys] -= 1.0 + step
        history.append(expected.copy())
    worker.commits.flush()
    thread.join()
    # The first S + 1 wait for no commit; all others came along.
    assert ran == [False] * (staleness + 1) + [True] * (STEPS - staleness - 1)
    assert not worker.rows._following
    worker.close()


def test_where_a_step_is_dropped_the_pull_is_sent_by_itself(client, ran):
    worker = Worker(client, 0)
    thread = threading.Thread(
        target=worker.rows.pull_in_turn, args=(worker.distinct(1), 1), daemon=True
    )
    thread.start()
    wait_until(lambda: 0 in worker.rows._following, "it waits", LIMIT_S)
    worker.notices.tell((0, 0), COMMITTED, 0)
    thread.join()
    assert ran == [False]
    assert worker.rows.following(0) is None
    worker.close()


@pytest.mark.parametrize("taken", [False, True])
def test_who_is_told_to_end_keeps_no_memory(client, taken):
    worker, memory = Worker(client, 0), client.session().memory()
    ended = []

    def source():
        try:
            worker.rows.pull_in_turn(worker.distinct(1), 1)
        except Stopped as error:
            ended.append(error)

    thread = threading.Thread(target=source, daemon=True)
    thread.start()
    wait_until(lambda: 0 in worker.rows._following, "it waits", LIMIT_S)
    before = set(memory._attached)
    asked = worker.rows.following(0) if taken else None
    worker.stop.set()
    thread.join()
    assert len(ended) == 1
    assert not worker.rows._following
    if asked is not None:  # a commit under way may end only now
        client.commit_async(TABLES + "series", 0, 1, parts={}, along=asked).result(20)
    assert len(before - memory._attached) == 1
    worker.close()
