"""The clock of a busy machine: a thread's computing and waiting count, others' work does not."""

import os
import subprocess
import sys
import threading
import time

from workers.profiling.clock import QuietClock

SPIN_S = 0.3


def test_a_machine_full_of_others_adds_nothing_to_what_a_thread_computes():
    others = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"])
        for _ in range(os.cpu_count() or 1)
    ]
    try:
        clock = QuietClock()
        wall, used, quiet = time.perf_counter(), time.thread_time(), clock.now()
        until = time.monotonic() + SPIN_S
        while time.monotonic() < until:
            pass
        quiet = clock.now() - quiet
        used, wall = time.thread_time() - used, time.perf_counter() - wall
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert used * 0.9 <= quiet <= wall


def test_sleeping_counts():
    clock = QuietClock()
    begin = clock.now()
    time.sleep(0.05)
    assert clock.now() - begin >= 0.04


def test_a_thread_that_is_gone_has_wall_time():
    thread = threading.Thread(target=lambda: None)
    thread.start()
    thread.join()
    clock = QuietClock(thread.native_id)
    assert clock.now() <= time.perf_counter()
