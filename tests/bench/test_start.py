"""What is said of a start is of this job, in order, and of processes that are there."""

import json
import os
import signal
import subprocess
import sys

from bench.start.memory import used_by
from bench.start.timeline import timeline
from tests.waiting import wait_until


def line(at, message, **more):
    when = f"2026-01-01T00:00:{at:06.3f}Z"
    return json.dumps({"time": when, "role": "node", "message": message, **more})


def test_a_timeline_has_what_was_said_of_the_job_in_between(tmp_path):
    log = tmp_path / "node.log"
    told = [line(12.5, "second", job="one"), line(11, "first"), line(12, "another", job="two")]
    log.write_text("\n".join([*told, line(3, "before"), line(30, "after"), "no JSON {"]))
    began = 1767225600.0 + 10  # 2026-01-01
    said = f"stage 0  {line(13, 'third', job='one')}"
    events = timeline(began, began + 4, [log], said, "one")
    found = [(event.at, event.what) for event in events]
    expected = [(1.0, "first"), (2.5, "second"), (3.0, "third"), (4.0, "the first step is over")]
    assert found == expected


def test_memory_is_that_of_a_process_and_all_that_it_has_started():
    inner = "import time; kept = bytearray(1 << 26); print(flush=True); time.sleep(600)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    argv = [sys.executable, "-c", outer]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            process.stdout.readline()
            used = used_by(process.pid)
            assert len(used) == 2
            assert used[0].pss >= used[0].own >= 1 << 26
            assert used[1].own < 1 << 26
        finally:
            os.killpg(process.pid, signal.SIGKILL)
    wait_until(lambda: not used_by(process.pid), "they end")
