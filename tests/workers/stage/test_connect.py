"""A worker that cannot be built leaves nothing open behind."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import StageWorkers, Topology
from workers.links.inbox import Stopped
from workers.links.pipeline import Place
from workers.ops.linear import Routes
from workers.stage import connect
from workers.stage.cuts.beginning import Beginning
from workers.stage.experts import offloading

OPENED = ("ParameterClient", "Outbox", "_group", "Notices")


@pytest.mark.parametrize("folder", [None, "disk"])
@pytest.mark.parametrize("failing", [*OPENED[1:], "assemble"])
def test_what_was_opened_is_closed(monkeypatch, failing, folder):
    opened, closed = [], []

    def kind(name):
        class Opened:
            def __init__(self, *args, **options):
                if name == failing:
                    raise Stopped("stopped")
                opened.append(name)

            def abort(self):
                pass

            def close(self):
                closed.append(name)

        return Opened

    for name in (*OPENED, "assemble"):
        monkeypatch.setattr(connect, name, kind(name))
    monkeypatch.setattr(offloading, "take_out", kind("take_out"))
    share = SimpleNamespace(
        launch=LaunchRequest(job_id="job"),
        place=Place(1, 0, (1, 1, 1)),
        device=torch.device("cpu"),
        graph=SimpleNamespace(module=nn.Identity()),
        routes=Routes(),
        schedule=SimpleNamespace(micro_batches=1, steps=1),
        fixed=False,
        layers=(),
        batches=SimpleNamespace(position=None),
        contents="",
        held_out=None,
        beginning=Beginning(),
        folder=folder,
        rooms={},
        **dict.fromkeys(("precision", "staleness", "tables")),
    )
    session = SimpleNamespace(inbox=None, generation=0, board=None, on_back=lambda act: None)
    workers = [StageWorkers(addresses=[f"h:{port}"]) for port in (1, 2, 3)]
    with pytest.raises(Stopped):
        connect.build(share, Topology(stages=workers), session, None, None)
    assert sorted(closed) == sorted(opened)
    assert ("take_out" in opened) == (folder is not None and failing in ("Notices", "assemble"))
