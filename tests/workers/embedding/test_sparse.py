"""Bags and PAD against `nn.EmbeddingBag`, and what an embedding says of its table."""

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from heterps import PAD, Admission, Eviction, Score, Segment, SparseEmbedding
from protos.job_pb2 import JobSpec
from ps import LocalTable
from ps.errors import TableError
from workers.data.keys import Slot, hash_column, hash_slots
from workers.embedding.sparse import bind_rows, unique_keys
from workers.model.code.entry import ModelError, change_tables

ROWS, DIM = 7, 3


def bags():
    """Keys [6, 4]: full, with repeated keys, PAD anywhere, one of PAD alone."""
    return torch.tensor(
        [
            [1, 2, 3, 4],
            [5, 5, 2, PAD],
            [PAD, 6, PAD, 1],
            [PAD, PAD, PAD, PAD],
            [0, PAD, 0, 0],
            [3, PAD, PAD, PAD],
        ]
    )


def bound(pooling, keys, weight):
    """A layer bound as a stage binds it, and its rows."""
    layer = SparseEmbedding("t", weight.shape[1], pooling=pooling)
    distinct, inverse, there = unique_keys(keys.reshape(-1).numpy())
    rows = weight[torch.from_numpy(distinct.astype(np.int64))].clone().requires_grad_()
    bind_rows([layer], rows, torch.from_numpy(inverse), padded=there is not None)
    return layer, rows, distinct


@pytest.mark.parametrize("pooling", ["sum", "mean", "max"])
@pytest.mark.parametrize("padded", [True, False])
def test_bags_are_those_of_plain_pytorch(pooling, padded):
    torch.manual_seed(0)
    keys = bags() if padded else bags()[:1]
    weight = torch.randn(ROWS, DIM)
    factors = torch.randn(len(keys), DIM)
    plain = nn.EmbeddingBag(ROWS + 1, DIM, mode=pooling, padding_idx=ROWS)
    with torch.no_grad():
        plain.weight[:ROWS] = weight
    layer, rows, distinct = bound(pooling, keys, weight)

    expected = plain(torch.where(keys == PAD, ROWS, keys))
    found = layer(keys)
    torch.testing.assert_close(found, expected)
    (expected * factors).sum().backward()
    (found * factors).sum().backward()
    assert PAD not in distinct.astype(np.int64)
    gradients = torch.zeros(ROWS, DIM).index_put_(
        (torch.from_numpy(distinct.astype(np.int64)),), rows.grad
    )
    torch.testing.assert_close(gradients, plain.weight.grad[:ROWS])


@st.composite
def any_bags(draw):
    """Keys [..., length], with ties and PAD, and a width; a few bags or many keys."""
    shape = draw(st.sampled_from([(1, 1), (5, 3), (2, 3, 4), (40, 17)]))
    seed, there = draw(st.integers(0, 999)), draw(st.sampled_from([0.1, 0.6, 1.0]))
    random = np.random.default_rng(seed)
    keys = random.integers(0, draw(st.integers(1, 30)), shape)
    return np.where(random.random(shape) < there, keys, PAD), draw(st.sampled_from([1, 8, 65]))


@given(any_bags(), st.sampled_from(["sum", "mean", "max"]))
def test_any_bags_are_those_of_a_loop(bags, pooling):
    keys, dim = bags
    random = np.random.default_rng(1)
    weight = random.integers(-3, 4, (30, dim)).astype(np.float64)  # of which some are equal
    layer = SparseEmbedding("t", dim, pooling=pooling)
    distinct, inverse, there = unique_keys(keys.reshape(-1))
    rows = torch.tensor(weight[distinct.astype(np.int64)], dtype=torch.float32, requires_grad=True)
    bind_rows([layer], rows, torch.from_numpy(inverse), padded=there is not None)
    found = layer(torch.from_numpy(keys))
    factors = random.normal(size=found.shape)
    (found * torch.from_numpy(factors)).sum().backward()

    expected, gradients = np.zeros((*keys.shape[:-1], dim)), np.zeros((30, dim))
    for place in np.ndindex(*keys.shape[:-1]):
        own = [int(key) for key in keys[place] if key != PAD]
        if not own:
            continue
        several = weight[own]
        if pooling == "max":
            expected[place] = several.max(0)
            for column, first in enumerate(several.argmax(0)):
                gradients[own[first], column] += factors[place][column]
            continue
        share = 1 / len(own) if pooling == "mean" else 1
        expected[place] = several.sum(0) * share
        for key in own:
            gradients[key] += factors[place] * share
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-5, atol=1e-5)
    if len(distinct):
        made = rows.grad.numpy()
        np.testing.assert_allclose(made, gradients[distinct.astype(np.int64)], rtol=1e-4, atol=1e-4)


def test_the_greatest_of_a_bag_with_no_number_is_none():
    keys = torch.tensor([[0, 1, 2], [1, 2, 1]])
    weight = torch.tensor([[float("nan")], [5.0], [float("-inf")]])
    layer, *_ = bound("max", keys, weight)
    found = layer(keys).squeeze(1)
    assert found[0].isnan()
    assert found[1] == 5


@pytest.mark.parametrize("pooling", [None, "sum", "mean", "max"])
def test_a_batch_of_pad_alone_is_zeros_and_can_go_backward(pooling):
    keys = torch.full((2, 3), PAD)
    layer, rows, distinct = bound(pooling, keys, torch.randn(ROWS, DIM))
    found = layer(keys)
    assert torch.equal(found, torch.zeros((2, DIM) if pooling else (2, 3, DIM)))
    found.sum().backward()
    assert len(distinct) == 0
    assert rows.grad is None or not rows.grad.numel()


def test_pad_has_no_row_and_trains_none():
    layer = SparseEmbedding("t", DIM, initializer="normal", scale=1.0)
    keys = torch.tensor([[1, PAD], [PAD, 2]])
    found = layer(keys)
    assert (found[keys == PAD] == 0).all()
    assert (found[keys != PAD] != 0).all()
    found.sum().backward()
    assert sorted(layer.store.keys().tolist()) == [1, 2]


def test_all_lookups_of_a_backward_are_one_step_outside_of_a_job():
    layer = SparseEmbedding(
        "t", DIM, learning_rate=0.5, initial_accumulator=0.1, initializer="zeros"
    )
    plain = nn.Embedding(ROWS, DIM)
    nn.init.zeros_(plain.weight)
    optimizer = torch.optim.Adagrad(plain.parameters(), 0.5, initial_accumulator_value=0.1)
    top = nn.Linear(DIM, 1)
    for step in range(3):
        keys = torch.tensor([[0, 1, 2, 2], [3, 1, 4, step]])
        optimizer.zero_grad()
        for embedding in (plain, layer):
            twice = embedding(keys[:, :2]).sum(1) * embedding(keys[:, 2:] % 3).sum(1)
            (top(twice + embedding(keys[:, 0]))).square().sum().backward()
        optimizer.step()
        found = torch.from_numpy(layer.store.pull(np.arange(ROWS, dtype=np.uint64), True))
        torch.testing.assert_close(found, plain.weight.detach())
    assert not layer.store.pull(np.array([5], np.uint64), True).any()


def test_no_value_has_the_key_of_pad(monkeypatch):
    slots, columns = [Slot.parse("a")], {"a": hash_column(pa.array([1, 2]))}
    monkeypatch.setattr(Slot, "keys", lambda *_: np.array([1 << 63, 5], np.uint64))
    assert hash_slots(slots, columns, 2).tolist() == [[PAD + 1], [5]]


@pytest.mark.parametrize(
    "wrong",
    [
        {"pooling": "avg"},
        {"dtype": "float8"},
        {"l1": 0.1},
        {"betas": (0.9,)},
        {"stochastic_rounding": True},
        {"admission": Admission(kind="count", threshold=2, capacity=5)},
        {"admission": Admission(kind="score", threshold=2)},
    ],
)
def test_what_no_table_has_is_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        SparseEmbedding("t", DIM, optimizer="adam", **wrong)


def test_bags_need_an_axis_of_keys():
    with pytest.raises(ValueError, match="pooling='sum' expected"):
        SparseEmbedding("t", DIM, pooling="sum")(torch.tensor([1, 2]))


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        ({"ttl_s": 5, "every_steps": 1}, "ttl_s=5, which a training does not do"),
        ({"ttl_steps": 5}, "ttl_steps=5 without every_steps"),
        ({"min_norm": 1.0}, "without every_steps"),
        ({"every_steps": 1}, "max_rows"),
    ],
)
def test_eviction_that_nobody_would_do_is_refused(rules, named):
    with pytest.raises(TableError, match=named):
        SparseEmbedding("t", DIM, eviction=Eviction(**rules))


OPTIONS = {
    "optimizer": "adam",
    "learning_rate": 0.2,
    "weight_decay": 0.01,
    "betas": (0.5, 0.75),
    "eps": 1e-4,
    "amsgrad": True,
    "clip_norm": 2.0,
    "bound": 3.0,
    "trust_ratio": True,
    "initializer": "normal",
    "scale": 0.5,
    "seed": 9,
    "dtype": "float16",
    "stochastic_rounding": True,
    "memory_bytes": 1 << 20,
    "admission": Admission(kind="bloom", threshold=3, capacity=77, reads="zeros"),
    "eviction": Eviction(max_rows=9, order="lru", min_norm=0.25, every_steps=7),
    "score": Score(non_click=0.5, click=3, decay=0.75),
}


def created(layer):
    return LocalTable.create(layer.spec.table, **layer.spec.table_options()).spec


def test_every_option_reaches_the_table():
    spec = created(SparseEmbedding("t", DIM, **OPTIONS))
    o = spec.optimizer
    assert (o.kind, o.learning_rate, o.weight_decay) == ("adam", 0.2, 0.01)
    assert (o.beta1, o.beta2, o.epsilon, o.amsgrad) == (0.5, 0.75, 1e-4, True)
    assert (o.clip_norm, o.bound, o.trust_ratio) == (2.0, 3.0, True)
    assert (spec.initializer.kind, spec.initializer.scale, spec.initializer.seed) == (
        "normal",
        0.5,
        9,
    )
    assert (spec.dtype, spec.stochastic_rounding, spec.tier.memory_bytes) == (
        "float16",
        True,
        1 << 20,
    )
    a, e = spec.admission, spec.eviction
    assert (a.kind, a.threshold, a.capacity, a.reads) == ("bloom", 3, 77, "zeros")
    assert (e.max_rows, e.order, e.min_norm, e.every_steps) == (9, "lru", 0.25, 7)
    assert (spec.score.non_click, spec.score.click, spec.score.decay) == (0.5, 3, 0.75)
    ftrl = created(SparseEmbedding("t", DIM, optimizer="ftrl", l1=0.1, l2=0.2, beta=0.3)).optimizer
    assert (ftrl.l1, ftrl.l2, ftrl.beta) == (0.1, 0.2, 0.3)


def test_segments_have_their_own_settings():
    parts = [Segment(dim=1, optimizer="ftrl"), Segment(dim=2, optimizer="adam", lazy=2.0)]
    spec = created(SparseEmbedding("t", DIM, segments=parts))
    assert [part.optimizer.kind for part in spec.segments] == ["ftrl", "adam"]
    with pytest.raises(TableError, match=r"learning_rate=0\.3 beside segments"):
        SparseEmbedding("t", DIM, segments=parts, learning_rate=0.3)


def options_given():
    """A job with each of `OPTIONS`, as its file would have them."""
    job = JobSpec()
    options = job.tables["t"]
    for name, value in OPTIONS.items():
        if name in ("admission", "eviction", "score"):
            continue
        if name == "betas":
            options.betas.extend(value)
        else:
            setattr(options, name, value)
    admission, eviction = options.admission, options.eviction
    admission.kind, admission.threshold, admission.capacity = "bloom", 3, 77
    admission.reads = "zeros"
    eviction.max_rows, eviction.order, eviction.min_norm = 9, "lru", 0.25
    eviction.every_steps = 7
    options.score.non_click, options.score.click, options.score.decay = 0.5, 3, 0.75
    return job


def test_a_job_gives_a_table_what_the_model_could():
    model = nn.ModuleList([SparseEmbedding("t", DIM), SparseEmbedding("u", DIM, seed=4)])
    before = model[1].spec
    change_tables(model, options_given().tables)
    assert created(model[0]) == created(SparseEmbedding("t", DIM, **OPTIONS))
    assert model[1].spec == before


def test_a_job_leaves_the_rest_as_the_model_has_it():
    model = nn.ModuleList([SparseEmbedding("t", DIM, optimizer="adam", betas=(0.5, 0.75), seed=4)])
    job = JobSpec()
    job.tables["t"].learning_rate = 0.0
    change_tables(model, job.tables)
    assert model[0].spec.learning_rate == 0
    assert (model[0].spec.optimizer, model[0].spec.betas, model[0].spec.seed) == (
        "adam",
        (0.5, 0.75),
        4,
    )
    job.tables["t"].optimizer = "ftrl"  # which has no betas
    job.tables["t"].learning_rate = 0.5
    change_tables(model, job.tables)
    assert created(model[0]).optimizer.kind == "ftrl"


def test_a_job_names_tables_and_settings_that_there_are():
    model = nn.ModuleList([SparseEmbedding("deep", DIM, optimizer="adam")])
    job = JobSpec()
    job.tables["depe"].learning_rate = 1
    with pytest.raises(ModelError, match=r"tables.depe: no table .*deep"):
        change_tables(model, job.tables)
    job = JobSpec()
    job.tables["deep"].l1 = 1
    with pytest.raises(ModelError, match=r"tables.deep: .*l1"):
        change_tables(model, job.tables)
