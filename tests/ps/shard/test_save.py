"""One shard's part in saves."""

import numpy as np

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps.engine import _native
from ps.shard.push import take_apart
from ps.shard.save import Saver
from ps.shard.state import ShardState
from ps.table.spec import make_spec


def _push(state: ShardState, client: str, sequence: int) -> None:
    head = pb.PushRequest(table="t", dim=1, count=1, client=client, epoch=1, sequence=sequence)
    body = np.uint64([3]).tobytes() + np.float32([-1]).tobytes()
    message = pack(head, body)
    assert state.push(state.tables["t"], take_apart(head, memoryview(body), message), 1)


def _cut(saver: Saver, name: str) -> set[int]:
    """The sequences of client `lives` that a cut is told have been applied."""
    reply = saver.cut(pb.CutRequest(id=name, hold_s=5))
    saver.cut(pb.CutRequest(id=name, abandon=True))
    window = next(w for w in reply.clients if w.client == "lives")
    bits = np.unpackbits(np.frombuffer(window.bits, np.uint8), bitorder="little")
    told = range(max(0, window.highest - _native.WINDOW + 1), window.highest + 1)
    return {s for s in told if bits[s % _native.WINDOW]}


def test_what_saves_waited_for_in_vain_is_kept_while_it_counts(tmp_path) -> None:
    state = ShardState()
    state.create(make_spec("t", 1, optimizer="sgd", initializer="zeros"))
    saver = Saver(state)
    for number in range(50):
        lost = [pb.Pushes(client=f"gone-{number}", epoch=1, sequences=[5])]
        if number == 7:
            _push(state, "lives", 1)
            _push(state, "lives", 3)
            lost.append(pb.Pushes(client="lives", epoch=1, sequences=[2]))
        directory = str(tmp_path / f"save-{number}")
        saver.save(pb.SaveRequest(directory=directory, shards=1, lost=lost))
    assert _cut(saver, "first") == {1, 2, 3}, "the next save does not wait for it either"
    assert len(saver._lost) == 1
    _push(state, "lives", 3 + _native.WINDOW)
    assert _cut(saver, "second") == {3 + _native.WINDOW}
    assert not saver._lost
