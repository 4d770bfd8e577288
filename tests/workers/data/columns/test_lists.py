"""Lists of whole numbers as inputs, their masks, and the tokens that follow as labels."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from protos.job_pb2 import ColumnSpec, JobSpec
from workers.data import DataError, Dataset
from workers.data.check import check
from workers.data.tensors import first_samples, tensors_of
from workers.model.objective.loss import job_loss
from workers.model.objective.metrics import JobMetrics

LENGTH, WORDS = 4, 9
INT64 = pa.int64()
LISTS = [[5, 6], [], None, [1, 2, 3, 4], [8, 7, 6, 5, 4, 3], [2**40]]


@pytest.fixture
def job(tmp_path):
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.label = ".", "a.parquet", "y"
    columns = {"ids": ColumnSpec(of="tokens", type="ints", length=LENGTH, keep="first")}
    columns["there"] = ColumnSpec(of="tokens", type="mask", length=LENGTH)
    for name, spec in columns.items():
        job.data.columns[name].CopyFrom(spec)
    return job


def read(job, lists, kind=INT64):
    table = {"tokens": pa.array(lists, pa.list_(kind)), "y": pa.array([0] * len(lists))}
    pq.write_table(pa.table(table), f"{job.directory}/a.parquet")
    check(job)
    return tensors_of(first_samples(Dataset.of(job, "train"), len(lists)))


@pytest.mark.parametrize("keep", ["first", "last"])
def test_lists_are_cut_where_it_is_said_and_filled_up_behind(job, keep):
    job.data.columns["ids"].keep, job.data.columns["ids"].padding = keep, 3
    found = read(job, LISTS)
    for row, one in enumerate(LISTS):
        values = one or []
        values = values[:LENGTH] if keep == "first" else values[-LENGTH:]
        assert found["ids"][row].tolist() == values + [3] * (LENGTH - len(values))
        assert found["there"][row].tolist() == [1] * len(values) + [0] * (LENGTH - len(values))
    assert found["ids"].dtype == found["there"].dtype == torch.int64


@pytest.mark.parametrize(
    ("lists", "kind", "keep", "expected"),
    [
        ([[1], [1, 2, 3, 4, 5]], pa.int16(), "", r"row 2.*5 values.*length: 4|5 values.*row 2"),
        ([[1], [], [2, None]], pa.int64(), "first", "missing"),
        ([[2**63]], pa.uint64(), "first", "64 bits"),
        ([[0.5]], pa.float32(), "first", "whole numbers"),
    ],
)
def test_what_does_not_fit_is_named(job, lists, kind, keep, expected):
    job.data.columns["ids"].keep = keep
    with pytest.raises(DataError, match=expected):
        read(job, lists, kind)


def test_tokens_that_follow_are_labels_and_a_loss_counts_them(job):
    job.data.label, job.train.loss = "tokens", "next_token"
    lists = [[5, 6], [], [1, 2, 3, 4], [8, 7, 6, 5, 4, 3], [3], [2, -100, 7]]
    found = read(job, lists)
    none = -1
    expected = [[6, none, none], [none] * 3, [2, 3, 4], [7, 6, 5], [none] * 3, [none, 7, none]]
    labels = {"label": found["label.label"]}
    assert labels["label"].tolist() == [[*one, none] for one in expected]
    torch.manual_seed(0)
    logits = torch.randn(len(lists), LENGTH, WORDS, requires_grad=True)
    following = labels["label"].masked_fill(labels["label"] < 0, -100)
    plain = torch.nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())
    gradient = torch.autograd.grad(plain, logits)[0]
    loss, total = job_loss(job), 0.0
    counts = loss.counts(labels)
    assert counts == [8.0]
    for some in (slice(0, 2), slice(2, 3), slice(3, 6)):
        own = {"label": labels["label"][some]}
        share = len(own["label"]) / len(lists)
        total = total + loss.part(logits[some], own, share, loss.counts(own), counts)
    assert total.item() == pytest.approx(plain.item(), rel=1e-6)
    torch.testing.assert_close(torch.autograd.grad(total, logits)[0], gradient)
    metrics = JobMetrics(job)
    parts = [
        metrics.take(logits[some].detach(), {"label": labels["label"][some]})
        for some in (slice(0, 3), slice(3, 6))
    ]
    whole = {name: torch.cat([one[name] for one in parts]) for name in parts[0]}
    assert metrics.measure(whole, "valid")["valid_loss"] == pytest.approx(plain.item(), rel=1e-6)


def test_weights_count_each_token_of_a_sample(job):
    job.data.label, job.train.loss, job.data.weight = "tokens", "next_token", "weight"
    labels = {"label": torch.tensor([[1, 2, -1], [3, -1, -1]]), "weight": torch.tensor([1.0, 4.0])}
    logits = torch.from_numpy(np.random.default_rng(0).normal(size=(2, 3, WORDS)))
    loss = job_loss(job)
    each = torch.nn.functional.cross_entropy(
        logits[[0, 0, 1], [0, 1, 0]], torch.tensor([1, 2, 3]), reduction="none"
    )
    expected = (each * torch.tensor([1.0, 1.0, 4.0])).sum() / 6
    counts = loss.counts(labels)
    assert float(loss.part(logits, labels, 1.0, counts, counts)) == pytest.approx(float(expected))


def read_beside(job, inputs, labels):
    """Lists of labels beside others, in a second block of a file."""
    job.data.label, job.train.loss = "next", "next_token"
    table = {"tokens": [[1, 2]] * 3 + inputs, "next": [[3, 4]] * 3 + labels}
    pq.write_table(pa.table(table), f"{job.directory}/a.parquet", row_group_size=3)
    dataset = Dataset.of(job, "train")
    return tensors_of(first_samples(dataset, len(table["next"])))


def test_labels_of_another_column_stand_beside_its_values(job):
    found = read_beside(job, [[5, 6, 7, 8, 9], [], None], [[6, 7, 8, 9, 1], None, []])
    assert found["label.label"][3:].tolist() == [[7, 8, 9, -1], [-1] * 4, [-1] * 4]


@pytest.mark.parametrize(
    ("inputs", "labels", "got", "expected"),
    [
        ([[5, 6, 7]], [[6, 7]], 2, 3),
        ([[5, 6, 7]], [[6, 7, 8, 9]], 4, 3),
        ([[1, 2, 3, 4, 5, 6]], [[1, 2, 3, 4, 5]], 5, 6),  # though both are cut
        ([[5, 6]], [None], 0, 2),
        ([None], [[5]], 1, 0),
    ],
)
def test_labels_that_do_not_stand_beside_their_inputs_are_named(job, inputs, labels, got, expected):
    named = rf"a\.parquet, row 5: data\.label: next: got '{got} values', expected {expected}, as"
    with pytest.raises(DataError, match=named):
        read_beside(job, [[5], *inputs], [[6], *labels])


def test_lists_of_labels_need_lists_of_inputs(job):
    job.data.label, job.train.loss = "tokens", "next_token"
    del job.data.columns["ids"]
    with pytest.raises(DataError, match="type ints"):
        read(job, LISTS)
