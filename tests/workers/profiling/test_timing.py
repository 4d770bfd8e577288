"""What is timed of a layer, in operations rather than seconds: what a stage would do for it."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from protos.job_pb2 import JobSpec
from workers.learning.precision import Precision
from workers.model.chain.trace import TracedModel
from workers.model.objective.loss import job_loss
from workers.profiling.rows import ShardRows
from workers.profiling.timing import LayerTimer, Part

CPU = torch.device("cpu")


class Bias(nn.Module):
    """Code of others, which might change in place what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Doubled(nn.Module):
    """Does change it."""

    def forward(self, x: Tensor) -> Tensor:
        return x.mul_(2)


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.doubled, self.bias = nn.Linear(3, 8, bias=False), Doubled(), Bias()
        self.in_place, self.act = nn.ReLU(inplace=True), nn.ReLU()
        self.flat, self.last = nn.Flatten(), nn.Linear(8, 1)

    def forward(self, dense: Tensor) -> Tensor:
        x = self.flat(self.act(self.in_place(self.bias(self.doubled(self.first(dense))))))
        return self.last(x).squeeze(1)


class Counting(TorchDispatchMode):
    """Counts operations by name, backward's included."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


class Timer(LayerTimer):
    """Its clock has the operations at each of its beginnings and ends."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.counting, self.told = Counting(), []

    def _now(self) -> float:
        self.told.append(self.counting.counts.copy())
        return float(len(self.told))

    def parts(self, index: int, values: dict[str, Tensor]) -> list[Counter[str]]:
        """The operations that are in each part of a layer's time."""
        self.told = []
        with self.counting:
            self.run_layer(index, values)
        return [end - begin for begin, end in zip(self.told[::2], self.told[1::2], strict=True)]


def timer_of(model: nn.Module) -> Timer:
    job = JobSpec(name="chain")
    job.train.loss, job.train.optimizer.name = "mse", "sgd"
    rows = ShardRows(model, None, CPU, create=False)
    precision, loss = Precision.of("", CPU), job_loss(job)
    return Timer(TracedModel(model), job.train.optimizer, rows, CPU, precision, loss)


def test_what_is_timed_of_layers_is_what_the_model_does_all_in_one():
    model = Chain()
    timer = timer_of(model)
    values = {"dense": torch.randn(5, 3)}
    layers = range(len(timer.graphs) - 1)
    dense = values["dense"].clone()
    for _ in range(2):  # the first backward makes gradients
        timed = [timer.parts(layer, values) for layer in layers]

    whole = nn.Sequential(*[layer for name, layer in model.named_children() if name != "last"])
    forward, backward = Counting(), Counting()
    with forward:
        result = whole(dense)
    torch.testing.assert_close(values["flat"], result)
    ones = torch.ones(5, 8)
    with backward:
        torch.autograd.backward([result], [ones])
    for part, plain in ((Part.FORWARD, forward), (Part.BACKWARD, backward)):
        found = sum((parts[part] for parts in timed), Counter())
        assert _computed(found) == _computed(plain.counts)


def test_what_a_layer_changes_in_place_stays_as_it_was_for_others():
    timer = timer_of(Chain())
    given = torch.randn(5, 8)
    values = {"first": given.clone()}
    timer.run_layer([graph.inputs for graph in timer.graphs].index(("first",)), values)
    torch.testing.assert_close(values["first"], given, rtol=0, atol=0)
    torch.testing.assert_close(values["doubled"], given * 2, rtol=0, atol=0)


def _computed(counts: Counter[str]) -> dict[str, int]:
    """Without what is a matter of views alone."""
    views = ("view", "detach", "alias", "_unsafe_view", "t", "transpose")
    return {name: number for name, number in counts.items() if name not in views}


def test_runs_of_layers_do_what_all_at_once_do_and_keep_nothing():
    batches = [{"dense": torch.randn(5, 3), "label.label": torch.randn(5)} for _ in range(3)]
    kept = [dict(batch) for batch in batches]
    counted = []
    for ends in ((), (2, 3, 7)):
        torch.manual_seed(0)
        timer = timer_of(Chain())
        timer._runs = [range(begin, end) for begin, end in zip((0, *ends), ends, strict=False)]
        timer.time(batches[:1])  # the first backward makes gradients
        with timer.counting:
            assert timer.time(batches).shape == (3, 7, 3)
        counted.append(timer.counting.counts)
    assert all(p.grad is None for own in timer.parameters for p in own)
    assert not any(one.state for one in timer.optimizers if one is not None)
    at_once, by_runs = map(_computed, counted)
    # Each run goes through its layers once more before they are timed.
    for name in ("mm", "relu", "threshold_backward"):
        assert by_runs[name] * 3 == at_once[name] * 4 > 0, name
    assert [batch.keys() for batch in batches] == [batch.keys() for batch in kept]
