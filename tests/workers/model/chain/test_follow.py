"""Models that are followed: what their graphs have, what crosses, and what is refused."""

import math

import pytest
import torch
from torch import nn

from protos.job_pb2 import ColumnSpec, JobSpec
from workers.model.chain.follow import Followed
from workers.model.chain.trace import TracedModel
from workers.model.checks.followed import check_followed
from workers.model.code.entry import ModelError
from workers.model.module.inputs import inputs_of

WORDS, LENGTH, DIM = 11, 6, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(DIM, DIM)
        self.drop = nn.Dropout(0.5)

    def forward(self, x, mask, scale=1.0, *, positions):
        mixed = (mask.to(x.dtype) @ x) / LENGTH
        return {"x": x + scale * self.drop(self.inner(mixed)).tanh() + positions, "none": None}


class Body(nn.Module):
    """Asks shapes and settings, as no symbolic trace could answer."""

    def __init__(self, between):
        super().__init__()
        self.words = nn.Embedding(WORDS, DIM)
        self.places = nn.Embedding(LENGTH, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.between = between

    def forward(self, ids, there):
        x = self.words(ids)
        if x.shape[1] > LENGTH or torch.finfo(x.dtype).bits != 32:
            raise ValueError("too long")
        where = self.places(torch.arange(ids.shape[1], device=ids.device).unsqueeze(0))
        causal = torch.ones(ids.shape[1], ids.shape[1], device=ids.device).tril().bool()
        mask = causal.unsqueeze(0) & (there != 0).unsqueeze(1)
        for number, block in enumerate(self.blocks):
            x = block(x, mask, 1.0 + number, positions=where)["x"] + torch.tensor(0.25)
            x = self.between(x, ids)
        return x


class Net(Followed):
    def __init__(self, between=lambda x, ids: x):
        super().__init__()
        self.body, self.head = Body(between), nn.Linear(DIM, 3)

    def forward(self, batch):
        x = self.body(batch["ids"], batch["there"])
        last = batch["there"].sum(1) - 1
        return self.head(x[torch.arange(x.shape[0], device=x.device), last])


@pytest.fixture
def job():
    job = JobSpec()
    job.data.columns["ids"].CopyFrom(ColumnSpec(type="ints", length=LENGTH))
    job.data.columns["there"].CopyFrom(ColumnSpec(of="ids", type="mask", length=LENGTH))
    return job


def batch(samples):
    torch.manual_seed(samples)
    ids = torch.randint(1, WORDS, (samples, LENGTH))
    there = (torch.arange(LENGTH) < torch.randint(1, LENGTH + 1, (samples, 1))).long()
    return {"ids": ids * there, "there": there}


def staged(traced, cuts, given):
    """Through stages, each of which gets what crosses to it alone."""
    values, first = dict(given), 0
    for last in cuts:
        stage = traced.stage(first, last)
        results = stage.module.train(traced.model.training)(*(values[n] for n in stage.inputs))
        values, first = dict(zip(stage.outputs, results, strict=True)), last + 1
    return next(iter(values.values()))


def test_stages_give_what_the_model_gives(job):
    torch.manual_seed(0)
    model = Net().eval()
    traced = TracedModel(model, inputs_of(job.data))
    names = ["body.words", "body.places", "body.blocks.0", "body.blocks.1", "head"]
    assert [layer.name for layer in traced.layers] == names
    for samples in (1, 2, 7):
        given = batch(samples)
        expected = model(given)
        for cuts in ([4], [0, 4], [2, 4], [0, 1, 2, 3, 4]):
            assert torch.equal(staged(traced, cuts, given), expected)


def test_masks_are_made_of_inputs_in_every_stage_and_do_not_cross(job):
    traced = TracedModel(Net(), inputs_of(job.data))
    stage, given = traced.stage(0, 2), batch(5)
    results = stage.module.eval()(*(given[name] for name in stage.inputs))
    shapes = sorted(tuple(one.shape) for one in results)
    # Ids and where they are, of which masks are made; positions; and what the first block gave.
    assert shapes == [(1, LENGTH, DIM), (5, LENGTH), (5, LENGTH), (5, LENGTH, DIM)]


def test_dropout_is_on_in_training_alone(job):
    torch.manual_seed(0)
    model = Net()
    traced, given = TracedModel(model, inputs_of(job.data)), batch(5)
    model.train()
    torch.manual_seed(1)
    expected = model(given)
    torch.manual_seed(1)
    assert torch.equal(staged(traced, [4], given), expected)
    assert not torch.equal(expected, model.eval()(given))


def test_a_shared_embedding_keeps_its_stages_together(job):
    model = Net()
    model.head = nn.Linear(DIM, WORDS, bias=False)
    model.head.weight = model.body.words.weight
    traced = TracedModel(model, inputs_of(job.data))
    assert traced.uncut == (True, True, True, True, False)
    with pytest.raises(ModelError, match=r"share 'body\.words\.weight'"):
        traced.stage(0, 2)


def in_place(x, ids):
    x[:, 0] = 0.0
    return x


REFUSED = {
    "a value": (lambda x, ids: x * 2 if ids.sum() > 9 else x, "ata-dependent|depend"),
    "in place": (in_place, "in place"),
    "samples": (lambda x, ids: x.view(3, -1, DIM) if len(ids) == 3 else x, "samples"),
}


@pytest.mark.parametrize(("between", "expected"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_followed_is_refused(job, between, expected):
    with pytest.raises(ModelError, match=expected):
        TracedModel(Net(between), inputs_of(job.data))


def without_gradient(x, ids):
    with torch.no_grad():
        halved = x / 2
    return x + halved


def one_sample(x, ids):
    return x * 2 if ids.shape[0] == 1 else x


@pytest.mark.parametrize("between", [without_gradient, one_sample])
def test_a_graph_of_another_function_is_found_before_training(job, between, monkeypatch):
    parts = [batch(samples) for samples in (3, 4)]
    monkeypatch.setattr("workers.model.checks.followed.first_parts", lambda job: parts)
    check_followed(TracedModel(Net(), inputs_of(job.data)), job)
    with pytest.raises(ModelError, match="differ by"):
        check_followed(TracedModel(Net(between), inputs_of(job.data)), job)


class Small(Followed):
    def __init__(self, between):
        super().__init__()
        self.words, self.head, self.between = nn.Embedding(WORDS, DIM), nn.Linear(DIM, 3), between

    def forward(self, batch):
        return self.head(self.between(self.words(batch["ids"]), batch["ids"]))


OF_THE_NUMBER = {
    "more": lambda x, n: x * 2 if n > 50 else x,
    "less": lambda x, n: x * 2 if n < 3 else x,
    "even": lambda x, n: x * 2 if n % 2 == 0 else x,
    "a size": lambda x, n: x * 2 if n == x.shape[2] else x,
    "another size": lambda x, n: x * 2 if n == 2 * x.shape[1] else x,
    "truth": lambda x, n: x * bool(n > 50),
    "least": lambda x, n: x * min(n, 10),
    "most": lambda x, n: x * max(n, 10),
    "whole": lambda x, n: x * int(n),
    "float": lambda x, n: x * float(n),
    "share": lambda x, n: x * (1 / n),
    "divided": lambda x, n: x / n,
    "half": lambda x, n: x * (n // 2),
    "rest": lambda x, n: x * (n % 3),
    "root": lambda x, n: x / math.sqrt(n),
    "power": lambda x, n: x / n**0.5,
    "values": lambda x, n: x / x.numel(),
    "tensor": lambda x, n: x * torch.tensor(n),
    "list": lambda x, n: x * x.new_tensor([n]),
    "full": lambda x, n: x * torch.full((1,), n),
    "range": lambda x, n: x + torch.arange(n)[:, None, None],
    "mean": lambda x, n: x - x.mean(0),
    "sum": lambda x, n: x.sum(0) / n + x,
    "first": lambda x, n: x[:50].mean(0) + x,
    "last": lambda x, n: x[-3:].mean(0) + x,
    "fourth": lambda x, n: x[min(n, 4) - 1] + x,
    "split": lambda x, n: torch.cat([one - one.mean(0) for one in x.split(2)]),
    "chunks": lambda x, n: torch.cat([one - one.mean(0) for one in x.chunk(2)]),
    "each": lambda x, n: torch.stack([one * 2 for one in x]),
    "loop": lambda x, n: x + sum(range(n)),
    "pairs": lambda x, n: x.reshape(n // 2, 2, *x.shape[1:]).sum(1).repeat(2, 1, 1),
    "names": lambda x, n: x * {4: 2.0}.get(n, 1.0),
    "a list": lambda x, n: x * [1.0, 2.0, 3.0][n % 3],
    "flat": lambda x, n: x.reshape(-1, DIM).reshape(n, -1, DIM) * 2,
    "grown": lambda x, n: x + torch.zeros(n, LENGTH, DIM).index_fill(0, torch.arange(n), 1.0),
}


FOLLOWED = ("share", "divided", "half", "rest", "power", "values", "full", "range")
FOLLOWED = (*FOLLOWED, "mean", "sum", "flat", "grown")
SHOWN = ("more", "even", "first", "share", "range")


@pytest.mark.parametrize(
    "name",
    [n if n in SHOWN else pytest.param(n, marks=pytest.mark.exhaustive) for n in OF_THE_NUMBER],
)
def test_what_depends_on_how_many_samples_there_are_is_followed_rightly_or_refused(job, name):
    torch.manual_seed(0)
    model = Small(lambda x, ids: OF_THE_NUMBER[name](x, ids.shape[0])).eval()
    if name not in FOLLOWED:
        with pytest.raises(ModelError, match=r"how many samples|cannot be traced"):
            TracedModel(model, inputs_of(job.data))
        return
    traced = TracedModel(model, inputs_of(job.data))
    for samples in (2, 3, 4, 5, 8, 12, 60):
        given = batch(samples)
        torch.testing.assert_close(staged(traced, [1], given), model(given))


@pytest.mark.parametrize("name", ["dense", "tokens"])
def test_an_input_of_a_width_that_is_not_known_yet_is_refused(job, name):
    class Wide(Small):
        def forward(self, batch):
            x = super().forward(batch)
            return x + batch[name].sum(1)[:, None, None] * batch[name].shape[1]

    with pytest.raises(ModelError, match=f"reads '{name}', whose width .* data.columns"):
        TracedModel(Wide(lambda x, ids: x), inputs_of(job.data))
