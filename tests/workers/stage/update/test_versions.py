"""Versions of weights that are kept and gone on with."""

import pytest
import torch
from torch import nn

from workers.stage.update.versions import Versions


def weight(value):
    layer = nn.Linear(1, 1, bias=False)
    nn.init.constant_(layer.weight, value)
    return layer


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_who_goes_on_has_the_newest_weights_also_with_no_step_to_come(staleness, steps):
    """A worker that only saves the model has taken no step of its own; each step adds 1."""
    before = Versions(weight(0.0), staleness)
    before.open()
    for step in range(steps):
        before.advance(step)
        with torch.no_grad():
            before.parameters(step)[0].add_(1.0)
    kept = before.earlier(steps)
    assert [one["weight"].item() for one in kept] == [
        max(0.0, steps - age) for age in range(1, staleness + 1)
    ]
    module = weight(float(steps))
    after = Versions(module, staleness)
    after.open()
    after.resume(steps, kept)
    assert module.weight.item() == steps
    for step in range(steps, steps + 3):  # as if nothing had been in between
        after.use(step)
        before.use(step)
        assert module.weight.item() == before.parameters(step)[0].item()
        for one in (before, after):
            one.advance(step)
            with torch.no_grad():
                one.parameters(step)[0].add_(1.0)
        assert module.weight.item() == step + 1
