"""Losses, their held-out measures, and the learning rate over the steps."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from protos.job_pb2 import DenseOptimizer
from workers.learning.losses import held_out, loss_function
from workers.learning.optimizers import make_optimizer, make_schedule
from workers.learning.quality import measure


def test_next_token_is_the_cross_entropy_of_every_position():
    torch.manual_seed(0)
    logits, labels = torch.randn(3, 4, 7), torch.randint(0, 7, (3, 4))
    expected = -torch.stack(
        [logits[b, t].log_softmax(0)[labels[b, t]] for b in range(3) for t in range(4)]
    )
    assert loss_function("next_token")(logits, labels).item() == pytest.approx(
        expected.mean().item(), rel=1e-5
    )
    scores, counts = held_out("next_token", logits, labels)
    assert counts.tolist() == [4, 4, 4]
    torch.testing.assert_close(scores, expected.view(3, 4).mean(1))
    found = measure("next_token", scores.numpy(), counts.numpy(), "valid")
    nats = expected.mean().item()
    assert found["valid_loss"] == pytest.approx(nats, rel=1e-5)
    assert found["valid_bits_per_token"] == pytest.approx(nats / math.log(2), rel=1e-5)


def test_other_losses_take_predictions_of_any_shape():
    predictions, labels = torch.tensor([[0.0], [2.0]]), torch.tensor([0.0, 1.0])
    assert loss_function("mse")(predictions, labels).item() == pytest.approx(0.5)
    expected = (math.log(2) + math.log1p(math.exp(-2))) / 2
    assert loss_function("bce_with_logits")(predictions, labels).item() == pytest.approx(expected)
    assert held_out("mse", predictions, labels)[0].tolist() == [0.0, 2.0]


def rates(steps, **options):
    spec = DenseOptimizer(name="sgd", learning_rate=2.0, **options)
    optimizer = make_optimizer(spec, [nn.Parameter(torch.zeros(1))])
    schedule = make_schedule(spec, optimizer, steps)
    found = []
    for _ in range(steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        if schedule is not None:
            schedule.step()
    return np.array(found)


def test_rates_rise_and_fall_as_asked():
    assert (rates(5) == 2.0).all()
    assert rates(6, schedule="constant", warmup_steps=3).tolist() == [0.5, 1.0, 1.5, 2.0, 2.0, 2.0]
    cosine = rates(101, schedule="cosine", warmup_steps=1)
    assert cosine[0] == 1.0
    assert cosine[1] == 2.0
    assert cosine[51] == pytest.approx(1.1)  # half way from 2 to 0.2
    assert 0.2 < cosine[-1] < 0.201
    assert (np.diff(cosine[1:]) < 0).all()
