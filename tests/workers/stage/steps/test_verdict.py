"""What becomes of a step, by what its stages report."""

import math

import pytest
import torch

from workers.learning.precision import LossScale
from workers.stage.steps.verdict import LossScales, Outcome, Report, judge


def test_a_step_is_clipped_as_torch_clips():
    parts = [torch.randn(3), torch.randn(2, 2)]
    reports = [Report(float(p.double().square().sum()), True) for p in parts]
    for clip in (0.1, 1.0, 1e3):
        leaves = [p.clone().requires_grad_() for p in parts]
        for leaf, part in zip(leaves, parts, strict=True):
            leaf.grad = part.clone()
        torch.nn.utils.clip_grad_norm_(leaves, clip)
        verdict = judge(reports, clip, 1.0, scaled=False)
        assert verdict.outcome is Outcome.APPLY
        for leaf, part in zip(leaves, parts, strict=True):
            torch.testing.assert_close(leaf.grad, part * verdict.scale)
    scaled = [Report(report.squared_norm * 64, True) for report in reports]
    plain = judge(reports, 0.1, 1.0, scaled=False).scale
    assert judge(scaled, 0.1, 8.0, scaled=True).scale == pytest.approx(plain / 8)
    assert judge(scaled, 0.0, 8.0, scaled=True).scale == 1 / 8


@pytest.mark.parametrize(
    ("reports", "loss_scale", "scaled", "expected"),
    [
        ([Report(0, True, 1.0), Report(0, False)], 1.0, False, Outcome.DIVERGED),
        ([Report(0, True, math.nan)], 1.0, False, Outcome.DIVERGED),
        ([Report(0, True, math.inf)], 8.0, True, Outcome.DIVERGED),
        ([Report(0, False, 1.0), Report(0, True)], 8.0, True, Outcome.SKIP),
        ([Report(0, False, 1.0)], LossScale.LEAST, True, Outcome.DIVERGED),
        ([Report(0, True, 1e29)], 1.0, False, Outcome.APPLY),
    ],
)
def test_what_is_not_finite_is_skipped_or_the_end(reports, loss_scale, scaled, expected):
    assert judge(reports, 1.0, loss_scale, scaled=scaled).outcome is expected


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_a_step_is_scaled_by_the_verdicts_that_it_does_not_lack(staleness):
    scales = LossScales(LossScale(value=64.0, interval=2), staleness)
    value, good, expected = 64.0, 0, [64.0] * (staleness + 1)
    for step in range(12):
        assert scales.of(step) == expected[step]
        outcome = Outcome.SKIP if step in (1, 2, 7) else Outcome.APPLY
        scales.judged(step, outcome)
        good = 0 if outcome is Outcome.SKIP else good + 1
        value *= 0.5 if outcome is Outcome.SKIP else 2 if good == 2 else 1
        good %= 2
        expected.append(value)
    assert [LossScales(None, staleness).of(0), LossScales(None, 1).scaled] == [1.0, False]
