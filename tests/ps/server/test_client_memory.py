"""Memory that a client shares is the client's: a shard applies what it has checked of it."""

import mmap

import numpy as np
import pytest

from protos import parameter_server_pb2 as pb
from ps.server import data_plane
from ps.server.data_plane import DataPlane
from ps.shard.state import ShardState
from ps.table.spec import make_spec

KEYS = np.arange(4, dtype=np.uint64)
GRADS = np.full((4, 2), -1, np.float32)
NAMED = {"table": "t", "dim": 2, "count": 4}


@pytest.mark.parametrize("call", ["push", "commit"])
def test_what_changes_after_the_check_is_not_applied(
    monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    state = ShardState()
    state.create(make_spec("t", 2, optimizer="sgd", learning_rate=1.0, initializer="zeros"))
    served = DataPlane(state)
    content = KEYS.tobytes() + GRADS.tobytes()
    memory = mmap.mmap(-1, 4096)
    memory[: len(content)] = content
    served.regions._maps["r"] = memory

    def then_overwritten(name: str) -> None:
        checked = getattr(data_plane, name)

        def check(*args: object) -> object:
            found = checked(*args)
            memory[: len(content)] = b"\xff" * len(content)  # gradients that are not finite
            return found

        monkeypatch.setattr(data_plane, name, check)

    if call == "push":
        then_overwritten("take_apart")
        push = pb.PushRequest(**NAMED, client="me", epoch=1, sequence=1, region="r")
        _, applied = served.push(push.SerializeToString())
    else:
        then_overwritten("carried_part")
        commit = pb.CommitRequest(series="s", step=1, slots=1, scale=1, rate=1, region="r")
        commit.part.tables.add(**NAMED)
        _, applied = served.commit(commit.SerializeToString())
    assert applied
    assert (state.tables["t"].native.pull(KEYS, True) == 1).all()
    assert state.tables["t"].native.counters()["rows"] == 4
