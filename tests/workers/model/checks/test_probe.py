"""What is found out about a model by running it on a few samples, whatever its code calls it."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.workers.model.samples import job_of_samples
from workers.embedding.sparse import SparseEmbedding
from workers.learning.objective import MissingLabelError
from workers.model.chain.trace import TracedModel
from workers.model.checks.objective import check_metrics
from workers.model.checks.probe import (
    alone_in,
    check_parameters,
    micro_batches_of,
    mixes_samples,
    structures_of,
)
from workers.model.code.entry import ModelError
from workers.moe.layer import MoE


@pytest.fixture
def job(tmp_path):
    spec = job_of_samples(tmp_path)
    spec.train.batch_size, spec.train.staleness = 256, 1
    return spec


class Layer(nn.Module):
    """Computes what it is given."""

    def __init__(self, compute):
        super().__init__()
        self.compute = compute

    def forward(self, x):
        return self.compute(self, x)


class Counting(nn.Module):
    """Counts its forwards."""

    def __init__(self):
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        self.calls += 1
        return x


class Net(nn.Module):
    """An embedding, dense layers and one that is given, before and after which something may be."""

    def __init__(self, layer, before=lambda x: x, zeros=False):
        super().__init__()
        torch.manual_seed(0)
        self.embedding = SparseEmbedding("rows", 4, initializer="zeros" if zeros else "uniform")
        self.bottom = nn.Linear(11, 6)
        self.layer = layer
        self.top = nn.Linear(6, 1)
        self.before = [before]
        if zeros:
            nn.init.zeros_(self.top.weight)

    def forward(self, sparse, dense):
        x = self.bottom(torch.cat([self.embedding(sparse).flatten(1), dense], 1))
        return self.top(self.layer(self.before[0](torch.relu(x)))).squeeze(-1)


def numbered(x):
    return x + torch.arange(len(x))[:, None]


class Contrast(nn.Module):
    """Products of all pairs of a batch."""

    def forward(self, x):
        return x + (x @ x.T).softmax(1).diagonal()[:, None]


def within(x):
    """Scales a whole micro-batch down where any value is too large, which few are."""
    most = x.detach().abs().max()
    return x * (50 / most) if most > 50 else x


class Some(nn.Module):
    """Computes for some of the samples alone."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(6, 6)

    def forward(self, x):
        some, result = x[:, 0] > 0.1, x.clone()
        result[some] = self.inner(x[some])
        return result


class InTraining(nn.Module):
    def forward(self, x):
        return x - x.mean(0) if self.training else x


class OwnBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x - x.mean(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient - gradient.mean(0)


SAME = Layer(lambda self, x: x)
MIXING = {
    "mean": Layer(lambda self, x: x - x.mean(0)),
    "sum": Layer(lambda self, x: x / (1 + x.sum())),
    "softmax": Layer(lambda self, x: torch.softmax(x, 0)),
    "largest": Layer(lambda self, x: x / x.amax()),
    "sorted": Layer(lambda self, x: x.sort(0).values),
    "rolled": Layer(lambda self, x: x + x.roll(1, 0)),
    "little": Layer(lambda self, x: x + 1e-5 * x.mean(0)),
    "too large": Layer(lambda self, x: within(x)),
    "any": Layer(lambda self, x: torch.where((x.abs() > 50).any(), x.tanh(), x)),
    "number": Layer(lambda self, x: x / len(x)),
    "sequence": nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0),
    "places": Layer(lambda self, x: numbered(x)),
    "own backward": Layer(lambda self, x: OwnBackward.apply(x)),
    "pairs": Contrast(),
    "in training": InTraining(),
    "drawn": Layer(lambda self, x: x * getattr(torch, "ra" + "nd")(len(x), 1)),
}
SEPARATE = {
    "same": SAME,
    "norm": nn.LayerNorm(6),
    "attention": nn.Sequential(
        nn.Unflatten(1, (3, 2)),
        nn.TransformerEncoderLayer(2, 1, 8, dropout=0.0, batch_first=True),
        nn.Flatten(),
    ),
    "gelu": nn.Sequential(nn.Linear(6, 300), nn.GELU(), nn.Linear(300, 6)),
    "softmax": nn.Softmax(1),
    "each too large": Layer(lambda self, x: x.clamp(max=50.0)),
    "some": Some(),
    "convolution": nn.Sequential(
        nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3, padding=1), nn.Flatten(), nn.Linear(24, 6)
    ),
    "unit length": Layer(lambda self, x: nn.functional.normalize(x, dim=1)),
}


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("name", MIXING)
def test_a_layer_that_mixes_samples_has_its_micro_batches_fixed(job, name, zeros):
    traced = TracedModel(Net(MIXING[name], zeros=zeros))
    assert mixes_samples(traced, job)
    assert micro_batches_of(job, traced) == 4
    job.train.micro_batches = 7
    assert micro_batches_of(job, traced) == 7


@pytest.mark.parametrize("name", SEPARATE)
def test_layers_that_keep_samples_apart_leave_the_number_to_the_plan(job, name):
    traced = TracedModel(Net(SEPARATE[name]))
    assert not mixes_samples(traced, job)
    assert micro_batches_of(job, traced) == 0


@pytest.mark.parametrize(
    "between",
    [
        lambda x: x - x.mean(0),
        lambda x: x / x.sum(),
        lambda x: torch.softmax(x, 0),
        lambda x: x + (x @ x.T).sum(1, keepdim=True),
    ],
)
def test_operations_between_layers_are_seen_too(job, between):
    assert mixes_samples(TracedModel(Net(SAME, between)), job)
    assert not mixes_samples(TracedModel(Net(SAME, lambda x: x / (1 + x.sum(1, True)))), job)


class OfGroup(nn.Module):
    """Adds the mean of all samples with the same key, or divides by their number."""

    def __init__(self, by_mean):
        super().__init__()
        self.by_mean = by_mean

    def forward(self, x, keys):
        same = (keys[:, None] == keys).to(x.dtype)
        count = same.sum(1, keepdim=True)
        return x + same @ x / count if self.by_mean else x / count


class Grouped(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.bottom, self.group, self.top = nn.Linear(3, 6), group, nn.Linear(6, 1)

    def forward(self, sparse, dense):
        return self.top(self.group(self.bottom(dense), sparse[:, 1])).squeeze(-1)


class Keyed(nn.Module):
    """Keeps samples apart."""

    def forward(self, x, keys):
        return x * (keys % 3 == 0)[:, None]


@pytest.mark.parametrize("by_mean", [False, True])
def test_groups_are_seen_of_which_the_first_samples_have_one_each(job, by_mean):
    job.data.sparse[:] = ["d0", "d1"]  # keys of which no two samples have the same
    assert mixes_samples(TracedModel(Grouped(OfGroup(by_mean))), job)
    assert not mixes_samples(TracedModel(Grouped(Keyed())), job)


class WhereAny(nn.Module):
    """Does something to all samples where one has a key that three in four have not."""

    def forward(self, x, keys):
        return x.tanh() if (keys % 4 == 0).any() else x


def test_so_is_what_a_value_does_to_all_though_most_batches_have_it(job):
    job.data.sparse[:] = ["d0", "d1"]
    assert mixes_samples(TracedModel(Grouped(WhereAny())), job)


def counted_in_a_buffer_slowly(self, x):
    self.count *= 0.999
    return x * self.count


def kept_in_another_buffer(self, x):
    self.count = 0.9 * self.count + 0.1 * x.detach().mean()
    return x


class OfOneLength(torch.autograd.Function):
    """Has gradients of one length, over all samples."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient / gradient.norm()


def hooked():
    layer = nn.Linear(6, 6)
    layer.register_full_backward_hook(lambda _, given, __: (given[0] / given[0].norm(),))
    return layer


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(2, 6, batch_first=True)

    def forward(self, x):
        return self.gru(x.view(-1, 3, 2))[0][:, -1]


def halved():
    layer = nn.Linear(6, 6)
    layer.register_full_backward_hook(lambda _, given, __: (given[0] / 2,))
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        lambda: memory(counted_in_a_buffer_slowly),
        lambda: memory(kept_in_another_buffer),
        lambda: torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
        lambda: Layer(lambda self, x: OfOneLength.apply(x)),
        hooked,
    ],
)
def test_what_is_done_once_a_micro_batch_has_their_number_fixed(job, layer):
    assert micro_batches_of(job, TracedModel(Net(layer()))) == 4


@pytest.mark.parametrize(
    ("layer", "alone"),
    [
        (torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)), {"layer"}),
        (nn.Sequential(nn.Linear(6, 6), Counting()), {"layer"}),
        (nn.BatchNorm1d(6), set()),
        (nn.Linear(6, 6), set()),
    ],
)
def test_a_layer_whose_forward_changes_a_buffer_is_for_one_worker_alone(job, layer, alone):
    assert alone_in(TracedModel(Net(layer)), job) == alone


def test_so_is_each_call_of_such_a_layer(job):
    class Twice(Net):
        def forward(self, sparse, dense):
            x = self.layer(self.bottom(torch.cat([self.embedding(sparse).flatten(1), dense], 1)))
            return self.top(self.layer(x)).squeeze(-1)

    normed = torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
    assert alone_in(TracedModel(Twice(normed)), job) == {"layer", "layer#2"}


@pytest.mark.parametrize(
    "layer", [lambda: memory(lambda self, x: x * (1 + self.count)), halved, Sequence]
)
def test_buffers_that_stay_and_hooks_of_a_sample_leave_it_to_the_plan(job, layer):
    assert micro_batches_of(job, TracedModel(Net(layer()))) == 0


class Scaled(nn.Module):
    """Gives a number beside rows, and several layers' gradients."""

    def __init__(self):
        super().__init__()
        self.bottom, self.scale, self.top = nn.Linear(3, 4), Scale(), nn.Linear(4, 1)

    def forward(self, dense):
        x = self.bottom(dense)
        return {"y": self.top(x * self.scale()).squeeze(1), "scale": self.scale()}


class Scale(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(0.5))

    def forward(self):
        return self.weight.exp()


class Sometimes(nn.Module):
    """Gives another number of values for other samples."""

    def forward(self, x):
        return {"x": x} | {f"more {n}": x for n in range(int(x[2:3, 0].sum() > 0.4))}


def test_numbers_without_rows_and_numbers_of_values_are_tried_too(job):
    assert micro_batches_of(job, TracedModel(Scaled())) == 0
    net = Net(Sometimes())
    net.top = nn.Sequential(Layer(lambda self, x: x["x"]), nn.Linear(6, 1))
    assert micro_batches_of(job, TracedModel(net)) in (0, 4)


def test_values_that_cross_no_cut_are_found(job):
    net = Net(Layer(lambda self, x: (x @ torch.eye(6)).to_sparse()))
    net.top = nn.Sequential(Layer(lambda self, x: x.to_dense()), nn.Linear(6, 1))
    assert structures_of(TracedModel(net), job) == {"layer"}
    assert structures_of(TracedModel(Net(nn.Linear(6, 6))), job) == set()


def test_a_model_that_cannot_be_tried_is_taken_to_mix_samples(job):
    def fails(self, x):
        raise RuntimeError("only on a GPU")

    traced = TracedModel(Net(Layer(fails)))
    assert mixes_samples(traced, job)
    check_parameters(traced, job)  # it says so when it is trained


def test_a_trial_leaves_nothing_behind(job):
    layer = Layer(lambda self, x: self.scale(x))
    layer.scale = nn.Linear(6, 6)
    layer.register_buffer("calls", torch.zeros(()))
    layer.register_forward_hook(lambda module, *_: module.calls.add_(1))
    model = Net(layer)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    parameters = list(model.parameters())
    drawn = torch.get_rng_state()
    traced = TracedModel(model)
    mixes_samples(traced, job)
    check_parameters(traced, job)
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert model.embedding.store is None
    assert all(parameter.grad is None for parameter in parameters)


def hidden(kind):
    """A layer that computes with a parameter that it does not have."""
    weight = nn.Parameter(torch.ones(6))
    inner = nn.Linear(6, 6)
    layer = Layer(
        {
            "closure": lambda self, x: x * weight,
            "list": lambda self, x: x * self.kept[0],
            "module in a list": lambda self, x: self.modules_[0](x),
            "tensor": lambda self, x: x * self.kept[1],
        }[kind]
    )
    layer.kept = [weight, torch.ones(6, requires_grad=True)]
    layer.modules_ = [inner]
    return layer


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize("kind", ["closure", "list", "module in a list", "tensor"])
def test_what_would_be_neither_trained_nor_saved_is_refused(job, kind, staleness):
    job.train.staleness = staleness
    with pytest.raises(ModelError, match=r"'layer' computes with a tensor .* neither trained nor"):
        check_parameters(TracedModel(Net(hidden(kind))), job)


@pytest.mark.parametrize("staleness", [0, 1])
def test_another_layers_parameter_is_refused(job, staleness):
    job.train.staleness = staleness
    net = Net(Layer(lambda self, x: x * self.other[0].weight))
    net.layer.other = [net.top]
    with pytest.raises(ModelError, match=r"'layer' computes with 'top.weight', which it does not"):
        check_parameters(TracedModel(net), job)


def test_a_closure_over_an_own_parameter_is_refused_where_versions_are_exchanged(job):
    weight = nn.Parameter(torch.ones(6))
    layer = Layer(lambda self, x: x * weight)
    layer.weight = weight
    traced = TracedModel(Net(layer))
    with pytest.raises(ModelError, match=r"'layer.weight' by a reference .* train.staleness: 0"):
        check_parameters(traced, job)
    job.train.staleness = 0
    check_parameters(traced, job)


def test_what_training_finds_is_not_refused(job):
    def compute(self, x):
        fresh = x.detach().requires_grad_()  # as for a penalty of gradients
        return x * self.listed[0] + fresh * self.frozen

    layer = Layer(compute)
    layer.weight = nn.Parameter(torch.ones(6))
    layer.frozen = nn.Parameter(torch.ones(6), requires_grad=False)
    layer.listed = [layer.weight]
    for model in (Net(layer), Net(SAME), Net(nn.LayerNorm(6))):
        check_parameters(TracedModel(model), job)


def test_shared_parameters_are_not_refused(job):
    net = Net(nn.Linear(6, 6))
    net.layer.weight = nn.Parameter(net.top.weight.detach().expand(6, 6).clone())
    net.top = nn.Linear(6, 6)
    net.top.weight = net.layer.weight
    check_parameters(TracedModel(net), job)


class Table(nn.Module):
    """Looks up numbers, in a table whose rows a forward makes shorter where they are too long."""

    def __init__(self, **options):
        super().__init__()
        self.rows = nn.Embedding(6, 6, **options)

    def forward(self, x):
        return self.rows(x.argmax(1)) + x


class Normed(nn.Module):
    """Has weights of length 1, by changing them."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))

    def forward(self, x):
        with torch.no_grad():
            self.weight.div_(self.weight.norm())
        return x * self.weight


class Clamped(nn.Module):
    """Has small weights, by changing them where no version counts it."""

    def __init__(self, most=0.5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.most = most

    def forward(self, x):
        self.weight.data.clamp_(-self.most, self.most)
        return x * self.weight


@pytest.mark.parametrize("staleness", [0, 1])
@pytest.mark.parametrize(
    ("layer", "named"),
    [
        (Table(max_norm=0.1), "'layer' changes 'layer.rows.weight'"),
        (Normed(), "'layer.weight'"),
        (Clamped(), "'layer.weight'"),
        (Clamped(5.0), "'layer.weight'"),  # none is as large as it begins
    ],
)
def test_a_forward_that_changes_parameters_is_refused_and_changes_none(
    job, layer, named, staleness
):
    job.train.staleness = staleness
    before = {name: value.clone() for name, value in layer.state_dict().items()}
    with pytest.raises(ModelError, match=named):
        check_parameters(TracedModel(Net(layer)), job)
    for name, value in layer.state_dict().items():
        assert torch.equal(value, before[name])
    check_parameters(TracedModel(Net(Table())), job)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_on_gradients_are_refused_where_they_would_not_see_those_of_steps(job, register):
    layer = nn.Linear(6, 6)
    getattr(layer.bias, register)(lambda grad: None)
    for staleness, micro_batches in ((0, 0), (0, 2), (1, 1)):
        job.train.staleness, job.train.micro_batches = staleness, micro_batches
        with pytest.raises(ModelError, match=r"'layer.bias' has a hook on its gradient"):
            check_parameters(TracedModel(Net(layer)), job)
    job.train.staleness, job.train.micro_batches = 0, 1
    check_parameters(TracedModel(Net(layer)), job)


METRICS = """
import torch

def matrix(outputs, batch):
    return torch.outer(outputs, outputs)

def of_many(outputs, batch):
    return 1 / (len(outputs) // 1000)

def other(outputs, batch):
    return batch["price"].mean()

class Several:
    def reset(self): self.seen = 0
    def update(self, scores, label): self.seen += len(label)
    def compute(self): return {"seen": self.seen, "of": [self.seen]}

def number(outputs, batch):
    return (outputs * batch["label"]).mean()

def in_place(outputs, batch):
    return (outputs.sigmoid_() > 0.5).float().mean()

def auc(outputs, batch):
    return 0.9
"""


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("matrix", "(?s)'matrix' is tensor.*expected a number, or numbers by name"),
        ("Several", r"'Several_of' is \[24\]"),
        ("other", "label 'price'"),
        ("number", None),
        ("of_many", None),  # which may do once there are more
        ("auc", "model.metrics: 'auc' is another metric's name, too"),
        ("in_place", r"metrics\.py:in_place changes in place what it is given as"),
    ],
)
def test_metrics_that_give_no_number_are_refused_before_training(job, tmp_path, name, expected):
    (tmp_path / "metrics.py").write_text(METRICS)
    job.model.metrics.append(f"metrics.py:{name}")
    job.train.loss = "bce_with_logits"
    traced = TracedModel(Net(nn.Linear(6, 6)))
    if expected is None:
        check_metrics(traced, job)
        return
    with pytest.raises((ModelError, MissingLabelError), match=expected):
        check_metrics(traced, job)


def annealed(self, x):
    self.calls = getattr(self, "calls", 0) + 1
    return x * min(1.0, self.calls / 100)


def averaged(self, x):
    self.mean = 0.9 * getattr(self, "mean", torch.zeros(6)) + 0.1 * x.detach().mean(0)
    return x - self.mean


def listed(self, x):
    self.seen.append(float(x.detach().sum()))
    return x * sum(self.seen)


def counted_in_a_buffer(self, x):
    self.count += 1
    return x * (self.count / 100)


def replaced_buffer(self, x):
    self.count = self.count + 1
    return x * (self.count / 100)


def noted(self, x):
    self.calls, self.last = getattr(self, "calls", 0) + 1, x
    self.seen.append(x)
    return x.relu()


def memory(compute):
    layer = Layer(compute)
    layer.seen, layer.generator = [], torch.Generator().manual_seed(1)
    layer.register_buffer("count", torch.zeros(()))
    return layer


REMEMBERING = {
    "counts": annealed,
    "averages": averaged,
    "list": listed,
    "generator": lambda self, x: x * torch.rand(6, generator=self.generator),
}
FORGETTING = {
    "buffer": memory(counted_in_a_buffer),
    "another buffer": memory(replaced_buffer),
    "notes": memory(noted),
    "in place": memory(lambda self, x: x.mul_(2)),
    "not finite": memory(lambda self, x: x.log()),
    "draws": memory(lambda self, x: x * torch.rand_like(x) * np.random.default_rng().integers(1)),
    "dropout": nn.Dropout(0.5),
    "norm": nn.BatchNorm1d(6),
    "spectral norm": torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6)),
    "experts": MoE(6, experts=4, gate="noisy", seed=3),
    "balanced experts": MoE(6, experts=4, gate="bias"),
}


@pytest.mark.parametrize("name", REMEMBERING)
def test_a_layer_that_computes_with_what_it_has_kept_is_refused(job, name):
    layer = memory(REMEMBERING[name])
    with pytest.raises(ModelError, match=r"'layer' computes with what it has kept .*buffer"):
        check_parameters(TracedModel(Net(layer)), job)


@pytest.mark.parametrize("name", FORGETTING)
def test_a_layer_that_follows_from_what_it_is_given_is_taken(job, name):
    layer = FORGETTING[name]
    state = {name: value.clone() for name, value in layer.state_dict().items()}
    drawn = torch.get_rng_state()
    check_parameters(TracedModel(Net(layer)), job)
    assert all(torch.equal(value, state[name]) for name, value in layer.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
