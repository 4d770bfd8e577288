"""The first stage's source deals each sample of an epoch to one micro-batch of one worker."""

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.job_pb2 import JobSpec
from workers.data import DataError, Dataset
from workers.device.copies import OnHost
from workers.links.inbox import Stopped
from workers.stage.schedule import Schedule
from workers.stage.source import TrainingSource, evaluation_batches
from workers.stage.staleness import StalenessBound

ROWS = 103


class NoRows:
    """The rows of a stage without embeddings."""

    def __init__(self, stop):
        self.bound = StalenessBound(0, stop, ordered=True)
        self.pulls = []

    def pull(self, micro_batches, *, learning):
        self.pulls.append((len(micro_batches), learning))
        step = len(self.pulls) - 1
        self.bound.acked(step)


@pytest.fixture
def job(tmp_path):
    """A job on rows whose one dense column is their number."""
    table = pa.table({"row": np.arange(float(ROWS)), "label": np.arange(ROWS) % 2})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    job = JobSpec(directory=str(tmp_path))
    job.data.path = "."
    job.data.train = job.data.valid = "rows.parquet"
    job.data.label = "label"
    job.data.dense.append("row")
    job.train.batch_size = 24
    job.train.epochs = 2
    job.train.seed = 5
    return job


def dealt(job, widths, rank, stop=None):
    """What a worker of the first stage is given, and what was pulled for it."""
    stop = stop or threading.Event()
    dataset = Dataset(job.data, "train", job.directory)
    schedule = Schedule.of(job, dataset, widths)
    rows, staging = NoRows(stop), OnHost()

    def upload(tensors):
        return {"dense": staging.upload(tensors["dense"])}

    source = TrainingSource(job, dataset, schedule, rank, rows, stop, upload)
    return schedule, rows, source


@pytest.mark.parametrize("widths", [[1], [2], [3], [2, 1], [1, 3], [3, 2, 1]])
@pytest.mark.parametrize("micro_batches", [0, 4, 5])
def test_an_epoch_is_dealt_once_over_workers_and_micro_batches(job, widths, micro_batches):
    job.train.micro_batches = micro_batches
    epochs = [[], []]
    for rank in range(widths[0]):
        schedule, rows, source = dealt(job, widths, rank)
        steps = list(source)
        assert [step.step for step in steps] == list(range(schedule.steps))
        own = schedule.micro_batches // widths[0]
        assert rows.pulls == [(own, True)] * schedule.steps
        for step in steps:
            assert [batch.position for batch in step.micro_batches] == list(range(own))
            for batch in step.micro_batches:
                assert batch.tensors["dense"].shape == (schedule.size, 1)
                assert batch.tensors["label"].shape == (schedule.size,)
                assert batch.on_device()["dense"] is batch.tensors["dense"]
                epoch = epochs[step.step // schedule.steps_per_epoch]
                epoch += batch.tensors["dense"][:, 0].tolist()
    for epoch in epochs:
        assert len(epoch) == len(set(epoch))
        assert set(epoch) <= set(range(ROWS))
        assert len(epoch) == schedule.steps_per_epoch * schedule.samples_per_step
        # Less than a step of each worker's share is left over.
        assert ROWS - len(epoch) < schedule.samples_per_step + widths[0]
    assert epochs[0] != epochs[1]


def test_the_same_seed_deals_the_same(job):
    job.train.micro_batches = 3

    def order():
        _, _, source = dealt(job, [1], 0)
        return [b.tensors["dense"][:, 0].tolist() for step in source for b in step.micro_batches]

    first = order()
    assert order() == first
    job.train.seed += 1
    assert order() != first


def test_max_steps_ends_it(job):
    job.train.max_steps = 3
    schedule, _, source = dealt(job, [1], 0)
    assert schedule.steps == len(list(source)) == 3


def test_a_stopped_source_gives_nothing_more(job):
    stop = threading.Event()
    _, _, source = dealt(job, [1], 0, stop)
    steps = iter(source)
    next(steps)
    stop.set()
    with pytest.raises(Stopped):
        next(steps)


def test_what_fails_while_reading_ahead_is_raised_where_it_is_used(job, monkeypatch):
    def fail(self, micro_batches, *, learning):
        raise OSError("the shard is gone")

    monkeypatch.setattr(NoRows, "pull", fail)
    _, rows, source = dealt(job, [1], 0)
    with pytest.raises(OSError, match="the shard is gone"):
        next(iter(source))
    rows.bound.before_push(10**6)  # nobody waits for pulls that will not come


def test_a_split_smaller_than_a_step_is_refused(job):
    job.train.batch_size = 4 * ROWS
    with pytest.raises(DataError, match=r"train\.batch_size"):
        dealt(job, [1], 0)


@given(
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 9),
    st.integers(1, 40),
    st.booleans(),
)
def test_a_schedule_spreads_micro_batches_evenly(first, second, wanted, batch_size, shared):
    job = JobSpec()
    job.train.micro_batches = wanted
    job.train.batch_size = batch_size
    job.train.epochs = 3
    job.train.split_experts = shared

    class Rows:
        rows = 1000

        def batches_per_epoch(self, batch_size, num_shards, drop_last):
            return self.rows // num_shards // batch_size

    schedule = Schedule.of(job, Rows(), [first, second])
    assert schedule.micro_batches % first == 0
    assert schedule.micro_batches >= max(wanted, first, second)
    assert not shared or schedule.micro_batches % second == 0
    assert schedule.size == max(1, batch_size // schedule.micro_batches)
    assert schedule.samples_per_worker * first == schedule.samples_per_step
    assert schedule.steps == 3 * schedule.steps_per_epoch


@pytest.mark.parametrize("workers", [1, 3])
def test_every_held_out_row_comes_once(job, workers):
    rows, numbers = [], []
    for rank in range(workers):
        for number, tensors in evaluation_batches(job, "valid", 10, rank, workers, lambda: False):
            numbers.append(number)
            rows += tensors["dense"][:, 0].tolist()
    assert sorted(rows) == list(range(ROWS))
    assert len(set(numbers)) == len(numbers)
    with pytest.raises(Stopped):
        next(evaluation_batches(job, "valid", 10, 0, workers, lambda: True))
