"""Each sample of a global batch comes to one micro-batch of one worker, whatever the widths."""

import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protos.job_pb2 import JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.held_out import HeldOut
from workers.device.copies import OnHost
from workers.links.inbox import Inbox, Stopped
from workers.model.objective.loss import job_loss
from workers.stage.rows.source import TrainingSource, evaluation_batches
from workers.stage.running.evaluation import first_batch
from workers.stage.steps.schedule import Schedule

ROWS = 103


class Rows:
    """The rows of a stage; says what was pulled of which step."""

    layers = ("embedding",)

    def __init__(self):
        self.order = self
        self.pulls = []
        self._asked = None

    def distinct(self, micro_batches, *, learning):
        self._asked = None  # before it is waited for
        return len(micro_batches)

    def expect(self, keys, step):
        assert self._asked is None  # while it is not waited for

    def pull_in_turn(self, keys, step):
        self._asked = step
        self.pulls.append((step, keys))
        return "rows"

    def pulled(self, step):
        assert step == self._asked


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


def dealt(job, micro_batches, rank, width, stop=None, rows=None):
    """The schedule, the rows and the source of a worker of the first stage."""
    inbox = Inbox(stop or threading.Event())
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    schedule = Schedule(batches.steps, batches.samples, micro_batches)
    rows, staging = rows or Rows(), OnHost()

    def upload(tensors):
        return {"dense": staging.upload(tensors["dense"])}

    def own(step):
        return schedule.own(step, rank, width)

    return (
        schedule,
        rows,
        TrainingSource(batches, own, range(schedule.steps), 0, rows, upload, inbox, job_loss(job)),
    )


@pytest.mark.parametrize("width", [1, 2, 3, 30])
@pytest.mark.parametrize("micro_batches", [1, 4, 5, 40])
def test_a_global_batch_is_dealt_once_over_workers_and_micro_batches(job, width, micro_batches):
    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    assert batches.steps == 2 * -(-ROWS // 24)
    steps = [[] for _ in range(batches.steps)]
    for rank in range(width):
        schedule, rows, source = dealt(job, micro_batches, rank, width)
        pulls = []
        for step in range(schedule.steps):
            own = schedule.own(step, rank, width)
            assert bool(own) == schedule.computes(step, rank, width)
            if not own:
                continue
            given = source.take()
            pulls.append((step, len(own)))
            assert given.rows == "rows"
            assert len(given.micro_batches) == len(own)
            for position, (spec, batch) in enumerate(zip(own, given.micro_batches, strict=True)):
                assert batch.position == position
                assert batch.rows == "rows"
                assert batch.on_device()["dense"].equal(batch.tensors["dense"])
                values = batch.tensors["dense"][:, 0].tolist()
                steps[step] += zip(range(spec.first, spec.last), values, strict=True)
        assert rows.pulls[: len(pulls)] == pulls
    for step, dealt_rows in enumerate(steps):
        batch = batches.read(step)["dense"][:, 0].tolist()
        assert sorted(dealt_rows) == list(enumerate(batch))


def test_a_stopped_source_gives_nothing_more(job):
    stop = threading.Event()
    _, _, source = dealt(job, 2, 0, 1, stop)
    source.take()
    stop.set()
    with pytest.raises(Stopped):
        [source.take() for _ in range(20)]


def test_what_fails_while_reading_ahead_is_raised_where_it_is_used(job):
    class Failing(Rows):
        def pull_in_turn(self, keys, step):
            if step == 1:
                raise OSError("the shard is gone")
            return super().pull_in_turn(keys, step)

    _, _, source = dealt(job, 2, 0, 1, rows=Failing())
    source.take()
    with pytest.raises(OSError, match="the shard is gone"):
        source.take()


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=6),
    st.integers(1, 9),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.booleans(),
)
def test_a_schedule_deals_every_micro_batch_to_one_worker(samples, micro_batches, widths, together):
    schedule = Schedule(
        len(samples), samples.__getitem__, micro_batches, lockstep=widths if together else ()
    )
    turn = 0
    for step, n in enumerate(samples):
        for width in widths:
            shares = [schedule.own(step, rank, width) for rank in range(width)]
            every = sorted((m for share in shares for m in share), key=lambda m: m.index)
            assert [m.index for m in every] == list(range(schedule.count(step)))
            assert sum(m.weight for m in every) == pytest.approx(1)
            for rank, share in enumerate(shares):
                assert all(m.number % width == rank for m in share)
            real = [m for m in every if m.weight]
            assert [m.first for m in real] == [0, *(m.last for m in real[:-1])]
            assert real[-1].last == n
            sizes = {m.last - m.first for m in real}
            assert max(sizes) - min(sizes) <= 1
            assert all(m.weight == pytest.approx((m.last - m.first) / n) for m in real)
            if together:
                assert len({len(share) for share in shares}) == 1
                assert len(real) == min(schedule.micro_batches, n)
                assert all(0 <= m.first < m.last <= n for m in every)
            else:
                assert every == real
                assert [m.number for m in every] == list(range(turn, turn + len(every)))
                assert len(every) == min(micro_batches, n)
        turn += schedule.count(step)


@pytest.mark.parametrize("workers", [1, 3])
def test_every_held_out_row_comes_once(job, workers):
    rows, numbers, held_out = [], [], HeldOut(job)
    for rank in range(workers):
        for number, tensors in evaluation_batches(
            held_out, "valid", 10, rank, workers, lambda: False
        ):
            numbers.append(number)
            rows += tensors["dense"][:, 0].tolist()
    assert sorted(rows) == list(range(ROWS))
    assert len(set(numbers)) == len(numbers)
    with pytest.raises(Stopped):
        next(evaluation_batches(held_out, "valid", 10, 0, workers, lambda: True))


def test_training_rows_that_are_gone_at_the_end_are_not_looked_at(job, tmp_path):
    batch = first_batch(HeldOut(job), "train", 2)
    assert batch is not None
    assert batch["dense"][:, 0].tolist() == list(range(24))
    (tmp_path / "rows.parquet").unlink()
    assert first_batch(HeldOut(job), "train", 2) is None


def test_held_out_rows_are_those_that_were_opened_whatever_becomes_of_the_file(job, tmp_path):
    """Those that were read stay; those that were not are refused."""
    read, unread = HeldOut(job), HeldOut(job)
    first = measured_rows(read)
    unread.of("valid")
    table = pa.table({"row": np.arange(5.0), "label": np.zeros(5, np.int64)})
    pa.parquet.write_table(table, tmp_path / "rows.parquet")
    assert measured_rows(read) == first == list(range(ROWS))
    assert first_batch(read, "valid", 1)["dense"][:, 0].tolist() == first
    with pytest.raises(DataError, match="as it was when reading began"):
        measured_rows(unread)


def measured_rows(held_out):
    batches = evaluation_batches(held_out, "valid", 10, 0, 1, lambda: False)
    return [row for _, tensors in batches for row in tensors["dense"][:, 0].tolist()]
