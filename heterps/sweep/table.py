"""The trials of a sweep as a table."""

import json
from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from heterps.report.terminal import table
from heterps.sweep.study import Trial, TrialState

_STYLES = {
    TrialState.COMPLETE: "green",
    TrialState.FAILED: "red",
    TrialState.INTERRUPTED: "yellow",
}


def trials_table(
    metric: str, keys: Sequence[str], trials: Sequence[Trial], best: Trial | None
) -> Table:
    """One row a trial, with its values in columns of the keys' last parts."""
    names = [key.rpartition(".")[2] for key in keys]
    made = table(">trial", "state", f">{metric}", *(f">{name}" for name in names), "")
    for trial in trials:
        is_best = best is not None and trial.number == best.number
        made.add_row(
            str(trial.number),
            Text(str(trial.state), style=_STYLES.get(trial.state, "")),
            f"{trial.value:.5g}" if trial.value is not None else "",
            *(value_text(trial.values[key]) if key in trial.values else "" for key in keys),
            Text("the best", "bold") if is_best else trial.reason,
        )
    return made


def trial_line(metric: str, trial: Trial, job_id: str) -> str:
    """How a trial ended, on one line."""
    parts = [f"trial {trial.number} {trial.state}"]
    if trial.value is not None:
        parts.append(f"{metric} {trial.value:.5g}")
    parts += [f"{key.rpartition('.')[2]} {value_text(v)}" for key, v in trial.values.items()]
    if trial.reason:
        parts.append(trial.reason)
    return "  ".join([*parts, f"({job_id})"] if job_id else parts)


def value_text(value: Any) -> str:
    """A value of a key; the study and the job file have all of its digits."""
    if isinstance(value, float):
        return f"{value:.4g}"
    return value if isinstance(value, str) else json.dumps(value)
