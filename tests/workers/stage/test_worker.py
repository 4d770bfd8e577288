"""What a worker does as it fails."""

import threading
from types import SimpleNamespace

import pytest

from protos.job_pb2 import JobSpec
from workers.links.pipeline import Place
from workers.stage import worker
from workers.stage.worker import Worker


def test_the_cause_is_told_before_what_others_write_goes(monkeypatch):
    """Who writes the same model fails then, of a file that is gone: that is not the cause."""
    done = []

    class Reporter:
        def __init__(self, *_, **__):
            pass

        def send(self, phase, **facts):
            done.append((phase, facts["error"]))
            raise ConnectionError("the scheduler is away")

        def close(self):
            done.append("closed")

    def fails(_):
        raise ValueError("the model has had enough")

    monkeypatch.setattr(worker, "Reporter", Reporter)
    made = Worker.__new__(Worker)
    made._launch, made._source, made._stop = SimpleNamespace(job=JobSpec()), None, threading.Event()
    made._share = SimpleNamespace(
        schedule=SimpleNamespace(steps=1), place=Place(0, 0, (1, 1)), contents=""
    )
    made._service = SimpleNamespace(address="", stop=lambda _: None)
    made._rendezvous, made._generation = None, fails
    made._unfinished = SimpleNamespace(abandon=lambda: done.append("abandoned"))
    with pytest.raises(ConnectionError):
        made.run(None)
    assert done == [("failed", "ValueError: the model has had enough"), "abandoned", "closed"]
