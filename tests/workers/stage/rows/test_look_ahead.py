"""Rows on servers' disks come into memory while the step before is under way."""

import os
import signal

import numpy as np
import torch
from torch import nn

from heterps import SparseEmbedding
from protos.job_pb2 import JobSpec
from protos.stage_pb2 import COMMITTED
from ps import LocalShards, ParameterClient
from tests.waiting import wait_until
from tests.workers.stage.in_process import TABLES
from tests.workers.stage.steps.test_staleness import order_of, tell
from workers.device.copies import OnHost
from workers.model.chain.trace import TracedModel
from workers.model.module.inputs import inputs_of
from workers.stage.rows.ahead import StageRows

DIM, KEYS, BUDGET = 64, 6000, 1 << 18
LIMIT_S = 60.0


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.item = SparseEmbedding("item", DIM, optimizer="sgd", learning_rate=1.0)
        self.top = nn.Linear(DIM, 1)

    def forward(self, sparse):
        return self.top(self.item(sparse[:, 0]))


def test_what_a_step_will_pull_comes_from_the_disk_before_it_may():
    job = JobSpec()
    job.data.label = "clicked"
    job.servers.memory_bytes = BUDGET
    with LocalShards(2) as shards, ParameterClient(shards.addresses) as client:
        graph = TracedModel(Net(), inputs_of(job.data)).stage(0, 1)
        order, notices, _ = order_of(0)
        rows = StageRows(
            graph.module, graph.lookups, client, order, lambda _: 1, OnHost(), TABLES, job
        )
        name = TABLES + "item"
        for some in np.array_split(np.arange(KEYS), 6):
            client.push(name, some, np.ones((len(some), DIM), np.float32))

        def total(what):
            return sum(getattr(t, what) for s in client.stats() for t in s.tables if t.name == name)

        wait_until(lambda: total("disk_rows") > KEYS // 3, "rows are on disks", LIMIT_S)
        wait_until(lambda: total("bytes") <= 3 * BUDGET, "there is room", LIMIT_S)
        keys = torch.arange(0, KEYS, 20)[:, None]
        wanted = rows.distinct([{"sparse": keys}], learning=True)
        expected = client.pull(name, keys[:, 0].numpy(), read_only=True)
        promoted, pulled = total("promoted"), total("pulled")
        rows.expect(wanted, 1)
        wait_until(lambda: total("promoted") > promoted + 50, "they come", LIMIT_S)
        assert total("pulled") == pulled
        tell(order, notices, COMMITTED, 0, 0)
        got = rows.pull(wanted, learning=True)
        (positions,) = got.of.inverse[next(iter(got.of.inverse))]
        np.testing.assert_array_equal(got.leaf("item")[positions.here()].detach(), expected)
        # What may be pulled at once is not asked for before.
        wait_until(lambda: all(one.done() for one in rows._expected), "it has ended", LIMIT_S)
        promoted = total("promoted")
        rows.expect(rows.distinct([{"sparse": keys + 7}], learning=True), 1)
        assert all(one.done() for one in rows._expected)
        assert total("promoted") == promoted
        rows.close()


def test_a_server_that_is_gone_is_told_of_by_the_pull_alone():
    job = JobSpec()
    job.data.label = "clicked"
    job.servers.memory_bytes = BUDGET
    with (
        LocalShards(1) as shards,
        ParameterClient(shards.addresses, timeout_s=1) as client,
    ):
        graph = TracedModel(Net(), inputs_of(job.data)).stage(0, 1)
        order, _, _ = order_of(0)
        rows = StageRows(
            graph.module, graph.lookups, client, order, lambda _: 1, OnHost(), TABLES, job
        )
        os.kill(shards.processes[0].pid, signal.SIGKILL)
        wanted = rows.distinct([{"sparse": torch.arange(9)[:, None]}], learning=True)
        rows.expect(wanted, 1)
        rows.expect(wanted, 1)
        client.close()
        rows._expected = []
        rows.expect(wanted, 1)
        rows.close()
