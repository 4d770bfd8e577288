"""A job's checkpoints, and what its attempts trained and lost."""

from collections.abc import Sequence
from datetime import datetime

from rich.table import Table

from heterps.client.attempts import Trained
from heterps.client.records import Cut, Move, Recovery, Share
from heterps.report.terminal import table
from heterps.view.figures import duration, money, rate, size


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


def went_back_text(one: Recovery) -> str:
    """What is trained again, where all went back to a checkpoint."""
    where = f"checkpoint {one.step}" if one.step else "the start"
    cost = f", {money(one.lost_cost)}" if one.price_per_hour else ""
    return f"all went back to {where}: {one.lost_steps} steps again ({duration(one.lost_s)}{cost})"


def moved_text(one: Move) -> str:
    """From which plan to which, and what that took."""
    way = f"{one.before} to {one.after}, {one.reason}"
    if one.failed:
        return f"{way}: {one.failed}"
    return f"{way}: at step {one.step}, in {one.seconds:.1f} s"


def share_text(one: Share) -> str:
    """Which worker has no unit of its own, and what that costs in pace."""
    pace = f"{rate(one.throughput)} samples/s predicted" if one.throughput else "slower"
    return f"{one.process}, on {one.node}, until another is free: {pace}, and one unit less to pay"


def clock(seconds: float) -> str:
    """A time, on this machine's clock."""
    return datetime.fromtimestamp(seconds).strftime("%Y-%m-%d %H:%M:%S")
