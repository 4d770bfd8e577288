"""A worker's own work, by a clock that is set."""

import torch

from workers.stage.report import busy


def test_what_it_waits_for_within_its_work_is_left_out(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(busy.time, "perf_counter", lambda: now[0])
    clock = busy.BusyClock(torch.device("cpu"))
    with clock.handling():
        now[0] += 2
        with clock.waiting():
            now[0] += 50
        with clock.running():
            now[0] += 1
    now[0] += 7
    assert clock.seconds() == 3.0
