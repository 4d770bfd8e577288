"""What few models do, on any plan as in one process of plain PyTorch."""

import numpy as np
import pytest
import torch
from torch import nn

from ps import LocalTable
from tests.workers.reverse import Reverse
from tests.workers.stage import reference
from tests.workers.stage.in_process import Pipeline
from tests.workers.stage.running.test_executor import job_of, seeded
from workers.data.columns.arrays import Batch
from workers.embedding.sparse import SparseEmbedding

STEPS, SAMPLES, KEYS = 5, 12, 9
MICRO_BATCHES = 3


def batches():
    random = np.random.default_rng(0)
    return [
        Batch(
            {
                "sparse": random.integers(0, KEYS, (SAMPLES, 2)),
                "dense": random.normal(size=(SAMPLES, 3)).astype(np.float32),
                "label.label": random.integers(0, 2, SAMPLES).astype(np.float32),
            }
        )
        for _ in range(STEPS)
    ]


class FrozenNorm(nn.Module):
    """Keeps the statistics that a normalising layer has come with, as for fine-tuning."""

    def __init__(self):
        super().__init__()
        self.bottom, self.norm, self.top = nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 1)
        self.norm.running_mean += 0.5
        self.norm.running_var *= 3.0

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, dense):
        return self.top(self.norm(self.bottom(dense)).tanh())


class Adversarial(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom, self.middle, self.top = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, dense):
        return self.top(self.middle(Reverse.apply(self.bottom(dense).tanh(), 0.5)).tanh())


class Chosen(nn.Module):
    """Leaves one of its inputs out where the other says so."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Linear(width, 1)

    def forward(self, one, other, dense):
        if dense.sum() > 0:
            return self.weight(other)
        return self.weight(one + other)


class Modalities(nn.Module):
    """In some steps a layer gets no gradient."""

    def __init__(self):
        super().__init__()
        self.one, self.other, self.top = nn.Linear(3, 4), nn.Linear(3, 4), Chosen(4)

    def forward(self, dense):
        return self.top(self.one(dense), self.other(dense), dense)


class Complex(nn.Module):
    """Weights, and values between layers, that are complex or conjugate."""

    def __init__(self):
        super().__init__()
        self.bottom, self.filter = nn.Sequential(nn.Linear(3, 6), Spectrum()), Filter()
        self.top = nn.Linear(8, 1)

    def forward(self, dense):
        z = self.bottom(dense)
        return self.top(torch.view_as_real(self.filter(z.conj()) + z).flatten(1))


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.rfft(x)


class Filter(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, dtype=torch.cfloat))
        self.other = nn.Parameter(torch.randn(4, dtype=torch.cfloat))

    def forward(self, z):
        return z * self.weight + z * self.other.conj()


class Constants(nn.Module):
    """Tensors made of numbers alone, and of a size, between layers."""

    def __init__(self):
        super().__init__()
        self.bottom, self.middle, self.top = nn.Linear(3, 5), nn.Linear(5, 5), nn.Linear(5, 1)

    def forward(self, dense):
        x = self.bottom(dense * torch.tensor([1.0, 2.0, 0.5]))
        scale = torch.linspace(0.5, 1, 5)
        x = self.middle(x * scale).tanh() * scale
        return self.top(x * torch.tensor(2.0, device=x.device) + torch.ones(5).cumsum(0))


def plain(model, job, steps):
    model.train()
    kind = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[job.train.optimizer.name]
    spec, losses = job.train.optimizer, []
    optimizer = kind(model.parameters(), lr=spec.learning_rate, weight_decay=spec.weight_decay)
    for batch in steps:
        predicted = model(torch.from_numpy(batch["dense"])).reshape(-1)
        label = torch.from_numpy(batch["label.label"])
        loss = nn.functional.binary_cross_entropy_with_logits(predicted, label)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("cuts", "widths"),
    [([2], [1]), ([2], [2]), ([0, 2], [1, 1]), ([1, 2], [2, 1]), ([0, 1, 2], [1, 2, 1])],
)
@pytest.mark.parametrize("optimizer", ["adam", "sgd"])
@pytest.mark.parametrize("kind", [FrozenNorm, Adversarial, Modalities, Complex, Constants])
def test_they_train_as_in_plain_pytorch(kind, optimizer, cuts, widths):
    job, steps, build = job_of(optimizer), batches(), seeded(kind)
    job.train.optimizer.weight_decay = 0.1
    model = build()
    losses = plain(model, job, steps)
    if kind is Modalities:  # it is a case of what is tested
        assert len({bool(batch["dense"].sum() > 0) for batch in steps}) == 2
    workers = Pipeline(job, build, cuts, widths, steps, 1).run()
    expected = model.state_dict()
    for worker in (worker for stage in workers for worker in stage):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6, msg=name)
    assert workers[-1][0].executor.progress.losses == pytest.approx(losses, rel=1e-5)


class Annealed(nn.Module):
    """Divides by a buffer that each forward changes, and that its backward reads."""

    def __init__(self):
        super().__init__()
        self.register_buffer("tau", torch.ones(()))

    def forward(self, x):
        if self.training:
            self.tau.mul_(0.95)
        return x / self.tau


class Counted(nn.Module):
    def __init__(self):
        super().__init__()
        self.bottom, self.middle, self.top = nn.Linear(3, 5), Annealed(), nn.Linear(5, 1)

    def forward(self, dense):
        return self.top(self.middle(self.bottom(dense)).tanh())


class Bounded(nn.Module):
    """Has layers of a largest singular value of 1, by a power iteration in each forward."""

    def __init__(self):
        super().__init__()
        normed = torch.nn.utils.parametrizations.spectral_norm
        self.bottom, self.middle = nn.Linear(3, 5), normed(nn.Linear(5, 5))
        self.top = normed(nn.Linear(5, 1))

    def forward(self, dense):
        return self.top(self.middle(self.bottom(dense)).tanh())


@pytest.mark.parametrize("cuts", [[2], [0, 2], [1, 2], [0, 1, 2]])
@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", [Counted, Bounded])
def test_buffers_that_forwards_change_are_those_of_one_process(kind, staleness, cuts):
    """Which runs the same micro-batches; there a backward comes before the next forward."""
    job, steps, build = job_of(staleness=staleness), batches(), seeded(kind)
    workers = Pipeline(job, build, cuts, [1] * len(cuts), steps, MICRO_BATCHES).run()
    model = build()
    before = {name: value.clone() for name, value in model.named_buffers()}
    optimizer = torch.optim.Adam(model.parameters(), lr=job.train.optimizer.learning_rate)
    weights = [[p.detach().clone() for p in model.parameters()]]
    for step, batch in enumerate(steps):
        for parameter, old in zip(
            model.parameters(), weights[max(0, step - staleness)], strict=True
        ):
            parameter.data.copy_(old)
        for part in range(MICRO_BATCHES):
            some = batch.slice(*(SAMPLES * n // MICRO_BATCHES for n in (part, part + 1)))
            out = model(torch.from_numpy(some["dense"])).reshape(-1)
            label = torch.from_numpy(some["label.label"])
            loss = nn.functional.binary_cross_entropy_with_logits(out, label)
            (loss / MICRO_BATCHES).backward()
        for parameter, newest in zip(model.parameters(), weights[-1], strict=True):
            parameter.data.copy_(newest)
        optimizer.step()
        optimizer.zero_grad()
        weights.append([p.detach().clone() for p in model.parameters()])
    expected = model.state_dict()
    assert any(not torch.equal(expected[name], value) for name, value in before.items())
    for (worker,) in workers:
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-5, msg=name)


class Histories(nn.Module):
    """In some micro-batches rows get no gradient."""

    def __init__(self):
        super().__init__()
        options = {"optimizer": "adam", "learning_rate": 0.05, "scale": 1.0, "weight_decay": 0.1}
        self.one = SparseEmbedding("one", 4, **options)
        self.other = SparseEmbedding("two", 4, **options)
        self.top = Chosen(4)

    def forward(self, sparse, dense):
        return self.top(self.one(sparse[:, 0]), self.other(sparse[:, 1]), dense)


def plain_rows(steps):
    """The rows after training by micro-batches; a step touches those that have a gradient."""
    model = seeded(Histories)()
    dense = torch.optim.Adam(model.parameters(), lr=0.05)
    tables, keys = {}, np.arange(KEYS, dtype=np.uint64)
    for name in ("one", "other"):
        spec = getattr(model, name).spec
        first = LocalTable.create(spec.table, **spec.table_options()).pull(keys, True)
        tables[name] = reference.Table(torch.from_numpy(first), "adam", 0.05, 0.1)
        setattr(model, name, reference.Given())
    left_out = 0
    for batch in steps:
        for part in range(MICRO_BATCHES):
            some = batch.slice(*(SAMPLES * n // MICRO_BATCHES for n in (part, part + 1)))
            for name, table in tables.items():
                getattr(model, name).rows = table.values().requires_grad_()
            predicted = model(*(torch.from_numpy(some[name]) for name in ("sparse", "dense")))
            loss = nn.functional.binary_cross_entropy_with_logits(
                predicted.reshape(-1), torch.from_numpy(some["label.label"])
            )
            (loss / MICRO_BATCHES).backward()
            for slot, (name, table) in enumerate(tables.items()):
                gradient = getattr(model, name).rows.grad
                left_out += gradient is None
                for key in set(some["sparse"][:, slot].tolist()) if gradient is not None else ():
                    row = table.rows[key]
                    row.grad = gradient[key] + (0 if row.grad is None else row.grad)
        dense.step()
        dense.zero_grad()
        for table in tables.values():
            table.learns.step()
            table.learns.zero_grad()
    assert 0 < left_out < MICRO_BATCHES * len(steps)
    return [table.values() for table in tables.values()]


@pytest.mark.parametrize(
    ("cuts", "widths"),
    [
        *(([2], [1]), ([2], [2]), ([2], [3]), ([1, 2], [1, 1]), ([1, 2], [2, 1])),
        *(([0, 1, 2], [1, 2, 1]), ([0, 2], [3, 2])),
    ],
)
def test_rows_without_a_gradient_stay_as_they_are(cuts, widths):
    pipeline = Pipeline(job_of(), seeded(Histories), cuts, widths, batches(), MICRO_BATCHES)
    pipeline.run()
    keys = np.arange(KEYS, dtype=np.uint64)
    for (_, table), expected in zip(
        sorted(pipeline.client.tables.items()), plain_rows(batches()), strict=True
    ):
        np.testing.assert_allclose(table.pull(keys, True), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("staleness", [1, 2])
@pytest.mark.parametrize(
    "kind", [FrozenNorm, Adversarial, Modalities, Histories, Complex, Constants]
)
def test_with_staleness_they_train_alike_on_any_plan(kind, staleness):
    job, found = job_of(staleness=staleness, clip=0.3), []
    for cuts, widths in (([2], [1]), ([2], [3]), ([0, 2], [1, 1]), ([0, 1, 2], [1, 2, 1])):
        pipeline = Pipeline(job, seeded(kind), cuts, widths, 2 * batches(), MICRO_BATCHES)
        workers, keys = pipeline.run(), np.arange(KEYS, dtype=np.uint64)
        state = {name: table.pull(keys, True) for name, table in pipeline.client.tables.items()}
        for leader, *_ in workers:
            state |= {name: v.numpy() for name, v in leader.module.state_dict().items()}
        found.append({**state, "losses": np.array(workers[-1][0].executor.progress.losses)})
    for other in found[1:]:
        assert other.keys() == found[0].keys()
        for name, value in found[0].items():
            np.testing.assert_allclose(other[name], value, rtol=1e-4, atol=1e-5, err_msg=name)
