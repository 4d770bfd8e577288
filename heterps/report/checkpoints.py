"""A job's checkpoints, and what its attempts trained and lost."""

from collections.abc import Sequence
from datetime import datetime

from rich.table import Table

from heterps.client.attempts import Trained
from heterps.client.records import Cut
from heterps.report.terminal import table
from heterps.view.figures import duration, money, size


def checkpoints_table(cuts: Sequence[Cut]) -> Table:
    """One row a checkpoint, the newest last."""
    made = table(">step", "!taken", ">took", ">waited", ">written", "metrics", "where")
    for cut in cuts:
        made.add_row(
            str(cut.step),
            clock(cut.taken_at),
            duration(cut.seconds),
            duration(cut.stall_s),
            size(cut.bytes),
            ", ".join(f"{name} {value:.4f}" for name, value in cut.metrics.items()),
            cut.place,
        )
    return made


def lost_text(one: Trained) -> str:
    """What an attempt that was followed by another trained, and what of it was lost."""
    if not one.seconds:
        return "it did not come to train"
    parts = [f"steps {one.from_step} to {one.step}"]
    if one.lost_s:
        cost = f", {money(one.lost_cost)}" if one.price_per_hour else ""
        parts.append(f"{one.lost_steps} of them lost ({duration(one.lost_s)}{cost})")
    else:
        parts.append("none lost")
    if one.away_s:
        parts.append(f"training again after {duration(one.away_s)}")
    return ", ".join(parts)


def clock(seconds: float) -> str:
    """A time, on this machine's clock."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
