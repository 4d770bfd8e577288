"""One shard's part in saves."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

import numpy as np
import pytest

from protos import parameter_server_pb2 as pb
from protos.codec import pack
from ps import LocalTable
from ps.engine import _native
from ps.errors import HoldEndedError
from ps.local.table import save_checkpoint
from ps.server.data_plane import DataPlane
from ps.shard.push import take_apart
from ps.shard.save import Saver
from ps.shard.state import ShardState
from ps.table.spec import make_spec
from tests.waiting import wait_until


def _push(state: ShardState, client: str, sequence: int) -> None:
    head = pb.PushRequest(table="t", dim=1, count=1, client=client, epoch=1, sequence=sequence)
    body = np.uint64([3]).tobytes() + np.float32([-1]).tobytes()
    message = pack(head, body)
    assert state.push(take_apart(head, memoryview(body), message), 1)


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


def test_a_load_for_which_pushes_were_not_held_back_is_begun_again(tmp_path: Path) -> None:
    """A shard that stood still let them go on: other shards have their parts of the same pushes."""
    state = ShardState()
    state.create(make_spec("t", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
    saver = Saver(state)
    _push(state, "lives", 1)
    save_checkpoint(tmp_path / "ck", [LocalTable(state.tables["t"].spec, state.tables["t"].native)])
    requests = SimpleQueue[pb.LoadRequest | None]()
    requests.put(pb.LoadRequest(directory=str(tmp_path / "ck"), shards=1))
    replies = saver.load(iter(requests.get, None))
    assert next(replies).rows == 1
    saver.cut(pb.CutRequest(id="load", hold_s=0.01))
    _push(state, "lives", 2)  # waits until then
    requests.put(pb.LoadRequest(cut="load"))
    with pytest.raises(HoldEndedError):
        next(replies)
    assert state.tables["t"].native.pull(np.uint64([3]), True) == 2
    _push(state, "lives", 3)


def test_a_push_that_a_load_held_back_is_in_what_was_loaded(tmp_path: Path) -> None:
    """It had found its table before the load replaced it."""
    state = ShardState()
    state.create(make_spec("t", 1, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
    saver, plane = Saver(state), DataPlane(state)
    _push(state, "lives", 1)
    save_checkpoint(tmp_path / "ck", [LocalTable(state.tables["t"].spec, state.tables["t"].native)])
    requests = SimpleQueue[pb.LoadRequest | None]()
    requests.put(pb.LoadRequest(directory=str(tmp_path / "ck"), shards=1))
    replies = saver.load(iter(requests.get, None))
    next(replies)
    saver.cut(pb.CutRequest(id="load", hold_s=60))
    head = pb.PushRequest(table="t", dim=1, count=1, client="lives", epoch=1, sequence=2)
    message = pack(head, np.uint64([3]), np.float32([-1]))
    with ThreadPoolExecutor(1) as pool:
        pushed = pool.submit(plane.push, message)
        wait_until(lambda: state.gate.waiting, "the push waits")
        requests.put(pb.LoadRequest(cut="load"))
        next(replies)
        assert pushed.result(60)[1]
    assert state.tables["t"].native.pull(np.uint64([3]), True) == 2
