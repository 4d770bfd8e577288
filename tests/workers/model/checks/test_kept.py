"""What layers keep over forwards, and change for one another, is refused before it is trained."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from tests.workers.model.checks.test_probe import Net
from tests.workers.model.samples import job_of_samples
from workers.model.chain.trace import TracedModel
from workers.model.checks.probe import check_parameters
from workers.model.code.entry import ModelError


@pytest.fixture
def job(tmp_path):
    return job_of_samples(tmp_path)


class Counting(nn.Module):
    """Counts its forwards; what it does with the number is given."""

    of_all = 0

    def __init__(self, compute):
        super().__init__()
        self.calls, self.compute = 0, compute
        self.counted, self.notes = torch.zeros(()), {"calls": [0]}

    def forward(self, x):
        self.calls += 1
        return self.compute(self, x)


def warmed_up(self, x):
    return x * 0.5 if self.calls > 1000 else x


def annealed_loss(self, x):
    self.aux_loss = min(1.0, self.calls / 10_000) * x.square().mean()
    return x


def late_loss(self, x):
    self.aux_loss = x.square().mean() * (self.calls > 500)
    return x


def warmed_up_by_a_note(self, x):
    self.kept["calls"] += 1
    return x * 0.5 if self.kept["calls"] > 1000 else x


def warmed_up_by_an_object(self, x):
    self.note.calls += 1
    return x * 0.5 if self.note.calls > 1000 else x


_calls = 0


def warmed_up_by_a_global(self, x):
    global _calls  # noqa: PLW0603
    _calls += 1
    return x * 0.5 if _calls > 1000 else x


def warmed_up_by_its_class(self, x):
    type(self).of_all += 1
    return x * 0.5 if self.of_all > 1000 else x


def warmed_up_by_a_tensor(self, x):
    self.counted += 1
    return x * 0.5 if self.counted > 1000 else x


def warmed_up_by_another_tensor(self, x):
    self.counted = self.counted + 1
    return x * 0.5 if self.counted > 1000 else x


def warmed_up_by_a_list(self, x):
    self.notes["calls"][0] += 1
    return x * 0.5 if self.notes["calls"][0] > 1000 else x


def warmed_up_outside():
    calls = 0

    def compute(self, x):
        nonlocal calls
        calls += 1
        return x * 0.5 if calls > 1000 else x

    return compute


def told_now_and_then(self, x):
    if self.calls % 100 == 0:
        self.told = float(x.detach().mean())
    return x * 2


def numbered_log(self, x):
    self.log[self.calls] = 1.0
    return x * 2


def averaged_slowly(self, x):
    self.mean = 0.999 * getattr(self, "mean", torch.zeros(6)) + 0.001 * x.detach().mean(0)
    return x - self.mean


@pytest.mark.parametrize(
    "compute",
    [
        *(warmed_up, annealed_loss, late_loss, averaged_slowly),
        *(warmed_up_by_a_note, warmed_up_by_an_object, warmed_up_by_a_global),
        *(warmed_up_by_its_class, warmed_up_by_a_tensor, warmed_up_by_another_tensor),
        *(warmed_up_by_a_list, warmed_up_outside()),
    ],
)
def test_what_depends_on_how_often_a_layer_was_called_is_refused(job, compute):
    net = Net(Counting(compute))
    net.layer.kept, net.layer.note = {"calls": 0}, SimpleNamespace(calls=0)
    with pytest.raises(ModelError, match=r"'layer' computes with what it has kept or counted"):
        check_parameters(TracedModel(net), job)
    assert net.layer.calls == 0


@pytest.mark.parametrize("compute", [told_now_and_then, numbered_log])
def test_a_count_that_nothing_is_computed_with_is_taken(job, compute):
    net = Net(Counting(compute))
    net.layer.log = [0.0] * 50
    check_parameters(TracedModel(net), job)


@pytest.mark.parametrize(
    ("compute", "expected"),
    [(lambda x: x.square().mean(1), r"'layer' has an aux_loss \[8\]"), (torch.mean, None)],
)
def test_an_auxiliary_loss_that_is_no_number_is_refused(job, compute, expected):
    def penalised(self, x):
        self.aux_loss = compute(x)
        return x

    traced = TracedModel(Net(Counting(penalised)))
    if expected is None:
        check_parameters(traced, job)
        return
    with pytest.raises(ModelError, match=expected):
        check_parameters(traced, job)


class Target(nn.Module):
    """Moves frozen weights towards those that are trained, as momentum encoders do."""

    def __init__(self):
        super().__init__()
        self.online, self.target = nn.Linear(6, 6), nn.Linear(6, 6)
        self.target.requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            for mine, other in zip(self.target.parameters(), self.online.parameters(), strict=True):
                mine.mul_(0.9999).add_(other, alpha=0.0001)
        return self.online(x) - self.target(x)


def test_frozen_weights_that_a_forward_moves_are_refused(job):
    with pytest.raises(ModelError, match=r"'layer' changes 'layer.target.weight' in its forward"):
        check_parameters(TracedModel(Net(Target())), job)


class Unsaved(nn.Module):
    """Keeps something that its `state_dict` has not; what it does with it is given."""

    def __init__(self, compute, kept):
        super().__init__()
        self.compute = compute
        self.register_buffer("kept", kept, persistent=False)

    def forward(self, x):
        return self.compute(self, x)


def by_an_average(self, x):
    if self.training:
        self.kept = 0.9 * self.kept + 0.1 * x.detach().mean()
    return x - self.kept


def by_a_count(self, x):
    self.kept += 1
    return x / self.kept.clone()


def by_the_first(self, x):
    self.kept = x.detach().mean() if self.kept is None else self.kept
    return x - self.kept


def counted(self, x):
    self.kept += 1
    return x


def annealed_in_training(self, x):
    if not self.training:
        return x
    self.kept += 1
    return x * (1 + 1 / self.kept.clone())


def cached(self, x):
    if self.kept is None:
        self.kept = torch.linspace(0, 1, x.shape[1])
    return x + self.kept


@pytest.mark.parametrize(
    ("compute", "kept"),
    [(by_an_average, torch.zeros(())), (by_a_count, torch.ones(())), (by_the_first, None)],
)
def test_buffers_that_predictions_need_and_no_saved_model_has_are_refused(job, compute, kept):
    net = Net(nn.Sequential(nn.Linear(6, 6), Unsaved(compute, kept)))
    with pytest.raises(
        ModelError, match=r"buffer 'layer.1.kept'.*no saved model would have it.*persistent=True"
    ):
        check_parameters(TracedModel(net), job)
    assert net.layer[1].kept is kept


def test_such_buffers_may_be_saved(job):
    layer = Unsaved(by_an_average, torch.zeros(()))
    layer.register_buffer("kept", torch.zeros(()), persistent=True)
    check_parameters(TracedModel(Net(layer)), job)


@pytest.mark.parametrize(
    ("compute", "kept"),
    [(counted, torch.zeros(())), (annealed_in_training, torch.ones(())), (cached, None)],
)
def test_buffers_that_no_prediction_needs_may_be_left_out(job, compute, kept):
    check_parameters(TracedModel(Net(Unsaved(compute, kept))), job)


class Note:
    """What layers may tell one another by."""

    mask = None


class Tells(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.note = note

    def forward(self, x):
        self.note.mask = (x > 0.3).float()
        return x


class Hears(nn.Module):
    def __init__(self, note):
        super().__init__()
        self.note, self.inner = note, nn.Linear(6, 6)

    def forward(self, x, mask=None):
        mask = self.note.mask if mask is None else mask
        x = self.inner(x)
        return x if mask is None else x * mask


class Telling(nn.Module):
    def __init__(self, passes):
        super().__init__()
        note = Note()
        self.bottom, self.tells, self.hears = nn.Linear(3, 6), Tells(note), Hears(note)
        self.top, self.passes = nn.Linear(6, 1), passes

    def forward(self, dense):
        x = self.tells(self.bottom(dense))
        return self.top(self.hears(x, (x > 0.3).float()) if self.passes else self.hears(x))


def test_what_a_layer_tells_another_besides_is_refused(job):
    with pytest.raises(ModelError, match=r"'hears' computes with what another layer has kept"):
        check_parameters(TracedModel(Telling(passes=False)), job)
    check_parameters(TracedModel(Telling(passes=True)), job)


class Centred(nn.Module):
    """Changes in place what it is given."""

    def forward(self, x):
        x -= x.mean(-1, keepdim=True)
        return x * 2


class Changed(nn.Module):
    """Layers, of which one changes something in place; what is done with it is given."""

    def __init__(self, compute):
        super().__init__()
        self.one, self.centred, self.same = nn.Linear(3, 4), Centred(), nn.Identity()
        self.block = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 4))
        self.other, self.top = nn.Linear(3, 4), nn.Linear(4, 1)
        self.compute = [compute]

    def forward(self, dense):
        return self.top(self.compute[0](self, dense))


def of_an_input(net, dense):
    return net.one(net.centred(dense)) + net.other(dense)


def of_an_input_made_before(net, dense):
    doubled = dense * 2
    return net.one(net.centred(dense)) + net.other(doubled)


def of_an_operation_afterwards(net, dense):
    x = net.one(dense)
    return net.centred(x) + x * 2 * net.other(dense).sigmoid()


def of_a_view(net, dense):
    x = net.one(dense)
    return net.centred(x.view(-1, 2, 2)).flatten(1) + x


def of_the_same_by_a_layer(net, dense):
    x = net.one(dense)
    return net.centred(net.same(x)) + x


def by_a_function(net, dense):
    x = net.one(dense)
    y = net.same(x)
    torch.relu_(x)
    return net.block(y)


def of_a_residual(net, dense):
    x = net.one(dense)
    return x + net.block(x)  # PyTorch adds what the block has changed, and so do stages


def of_what_is_not_used_again(net, dense):
    return net.centred(net.one(dense))


def of_an_input_not_used_again(net, dense):
    return net.one(net.centred(dense))


@pytest.mark.parametrize(
    "compute",
    [
        *(of_an_input, of_an_input_made_before, of_an_operation_afterwards, of_a_view),
        *(of_the_same_by_a_layer, by_a_function),
    ],
)
def test_a_change_in_place_that_stages_would_not_see_is_refused(job, compute):
    with pytest.raises(ModelError, match=r"changes '(dense|one|same)' in place, which is"):
        check_parameters(TracedModel(Changed(compute)), job)


@pytest.mark.parametrize(
    "compute", [of_a_residual, of_what_is_not_used_again, of_an_input_not_used_again]
)
def test_a_change_in_place_that_stages_see_is_taken(job, compute):
    check_parameters(TracedModel(Changed(compute)), job)
