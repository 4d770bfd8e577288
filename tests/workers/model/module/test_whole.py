"""Which layers see a micro-batch whole, and how many micro-batches that makes."""

import pytest
import torch
from torch import nn

from protos.job_pb2 import TrainSpec
from workers.model.code.entry import ModelError
from workers.model.module.whole import (
    check_smallest,
    fixed_micro_batches,
    job_micro_batches,
    whole_seeing,
)
from workers.moe.layer import MoE


class Functional(nn.Module):
    def forward(self, x):
        return self.inner(x)

    def inner(self, x):
        return nn.functional.dropout(x, 0.5, self.training)


class Noisy(nn.Module):
    def forward(self, x):
        return sum(part + torch.randn_like(part) for part in [x])


class Balanced(nn.Module):
    def forward(self, x):
        self.aux_loss = x.square().mean()
        return x


class Plain(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3))
        self.init_weights()

    def init_weights(self):
        nn.init.normal_(self.weight)
        self.weight.data.normal_()

    def forward(self, x):
        return x * self.weight


def never():
    return False


@pytest.mark.parametrize(
    ("layer", "sees"),
    [
        (nn.BatchNorm1d(3), True),
        (nn.Dropout(0.1), True),
        (nn.Dropout(0.0), False),
        (nn.RReLU(), True),
        (nn.MultiheadAttention(4, 2, dropout=0.1), True),
        (nn.MultiheadAttention(4, 2), False),
        (nn.LSTM(3, 3, num_layers=2, dropout=0.1), True),
        (nn.LSTM(3, 3, num_layers=2), False),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.0), False),
        (nn.TransformerEncoderLayer(4, 2, dropout=0.1), True),
        (nn.InstanceNorm1d(3), False),
        (nn.InstanceNorm1d(3, track_running_stats=True), True),
        (nn.LayerNorm(3), False),
        (nn.Embedding(3, 3, scale_grad_by_freq=True), True),
        (nn.EmbeddingBag(3, 3, scale_grad_by_freq=True), True),
        (nn.Embedding(3, 3), False),
        (MoE(4, experts=2), True),
        (Functional(), True),
        (Noisy(), True),
        (Balanced(), True),
        (Plain(), False),
    ],
)
def test_what_sees_its_micro_batch_whole(layer, sees):
    model = nn.Sequential(nn.Linear(3, 3), layer)
    assert bool(whole_seeing(model)) == sees
    given = TrainSpec(batch_size=1024, micro_batches=7)
    assert job_micro_batches(given, model, never) == 7
    assert job_micro_batches(TrainSpec(batch_size=1024), model, never) == (4 if sees else 0)
    assert job_micro_batches(TrainSpec(batch_size=1024), model, lambda: True) == 4


@pytest.mark.parametrize(("batch", "number"), [(1, 1), (127, 1), (128, 2), (255, 3), (10_000, 4)])
def test_a_job_that_does_not_say_has_few_micro_batches(batch, number):
    assert fixed_micro_batches(batch) == number


def test_synchronous_batch_norm_sees_a_batch_as_one_micro_batch():
    train = TrainSpec(batch_size=1024, batch_norm="sync")
    assert job_micro_batches(train, nn.BatchNorm1d(3), never) == 1
    assert job_micro_batches(train, nn.Dropout(), never) == 4
    assert job_micro_batches(train, nn.Linear(2, 2), never) == 0


def test_a_micro_batch_of_one_sample_is_refused_where_it_would_be_normalised():
    check_smallest(nn.Linear(2, 2), 1)
    check_smallest(nn.Sequential(nn.BatchNorm1d(3)), 2)
    with pytest.raises(ModelError, match="'0' cannot normalise an epoch's last batch"):
        check_smallest(nn.Sequential(nn.BatchNorm1d(3)), 1)


class Teacher(nn.Sequential):
    """Stays in evaluation whatever mode the model is in."""

    def train(self, mode=True):
        return super().train(False)


def test_what_stays_in_evaluation_normalises_no_sample():
    model = nn.Sequential(Teacher(nn.BatchNorm1d(3)), nn.Linear(3, 1))
    check_smallest(model, 1)
    assert model.training
    model.append(nn.BatchNorm1d(1))
    with pytest.raises(ModelError, match="'2' cannot normalise"):
        check_smallest(model, 1)
