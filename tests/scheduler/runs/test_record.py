"""What is kept of a run, where it cannot be."""

import pytest

from protos.scheduler_pb2 import Move, RunRecord
from scheduler.runs.calls import Interrupted
from scheduler.runs.record import Record


def test_a_change_that_could_not_be_kept_is_not_told_of_later() -> None:
    """Whoever asked for it was refused."""
    kept: list[Move] = []
    ends = False

    def write(message: RunRecord) -> None:
        if ends:
            raise Interrupted
        if message.HasField("change"):
            kept.append(Move.FromString(message.change.SerializeToString()))

    record = Record(write, lambda units: None)
    ends = True
    with pytest.raises(Interrupted):
        record.note_change(Move(reason="asked"))
    assert record.change is None
    ends = False
    record.note_change(Move(reason="drained"))
    ends = True
    with pytest.raises(Interrupted):
        record.note_change(None)
    assert record.change == Move(reason="drained"), "it is still to be told of"
    assert kept == [Move(reason="drained")]
