"""The trials of a sweep as a table."""

import json
from collections.abc import Iterable, Sequence

from rich.table import Table
from rich.text import Text

from heterps.report.terminal import table
from heterps.sweep.study import Trial, TrialState

_DIGITS = 4  # of a value, or more
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
            *(value_text(trial, key, trials) if key in trial.values else "" for key in keys),
            Text("the best", "bold") if is_best else trial.reason,
        )
    return made


def trial_line(metric: str, trial: Trial, job_id: str, trials: Sequence[Trial]) -> str:
    """How one of some trials ended, on one line."""
    parts = [f"trial {trial.number} {trial.state}"]
    if trial.value is not None:
        parts.append(f"{metric} {trial.value:.5g}")
    parts += [f"{key.rpartition('.')[2]} {value_text(trial, key, trials)}" for key in trial.values]
    if trial.reason:
        parts.append(trial.reason)
    return "  ".join([*parts, f"({job_id})"] if job_id else parts)


def value_text(trial: Trial, key: str, trials: Iterable[Trial]) -> str:
    """A trial's value of a key, with as many digits as tell it from those of others.

    The study and the job file have all of them.
    """
    value = trial.values[key]
    if isinstance(value, float):
        others = {v for one in trials if isinstance(v := one.values.get(key), float)} - {value}
        return next(
            text
            for digits in range(_DIGITS, 18)
            if (text := f"{value:.{digits}g}") not in {f"{other:.{digits}g}" for other in others}
        )
    return value if isinstance(value, str) else json.dumps(value)
