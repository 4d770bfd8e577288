"""What is shown of the trials of a sweep."""

import pytest

from heterps.sweep.study import Trial, TrialState
from heterps.sweep.table import trial_line, trials_table

LR = "train.optimizer.learning_rate"


@pytest.mark.parametrize(
    ("rates", "shown"),
    [
        ((0.00012, 0.00013), ["0.00012", "0.00013"]),
        ((0.000123456, 0.000123461, 0.5), ["0.000123456", "0.000123461", "0.5"]),
        ((0.1, 0.1 + 2**-56), ["0.10000000000000001", "0.10000000000000002"]),
        ((0.1234567, 0.1234567), ["0.1235", "0.1235"]),
        ((1e-5, "one"), ["1e-05", "one"]),
        ((True, 2, None), ["true", "2", "null"]),
    ],
)
def test_trials_of_different_values_look_different(rates, shown):
    trials = [
        Trial(number, TrialState.COMPLETE, {LR: rate}, 0.5, "job", "")
        for number, rate in enumerate(rates)
    ]
    lines = [trial_line("valid_auc", trial, "job", trials) for trial in trials]
    assert [line.split("  ")[2] for line in lines] == [f"learning_rate {one}" for one in shown]
    column = trials_table("valid_auc", [LR], trials, None).columns[3]
    assert list(column.cells) == shown
