"""Children announce themselves and never outlive their parent."""

import os
import signal
import subprocess
import sys

import pytest

from chassis import process
from tests.pids import alive
from tests.waiting import wait_until

CHILD = """
import sys, threading
from chassis import process
stop = threading.Event()
process.install_signals(stop)
process.announce(sys.argv[sys.argv.index("--ready-file") + 1], address="here:1")
stop.wait()
"""
PARENT = f"""
import sys, time, pathlib
from chassis import process
argv = [sys.executable, "-c", {CHILD!r}]
child = process.spawn("child", argv, directory=pathlib.Path(sys.argv[1]))
child.wait_ready(20)
print(child.pid, flush=True)
time.sleep(60)
"""


def test_a_child_is_ready_when_it_says_so_and_stops_when_asked(tmp_path):
    child = process.spawn("child one", [sys.executable, "-c", CHILD], directory=tmp_path)
    assert child.wait_ready(20).address == "here:1"
    child.stop()
    assert child.poll() == 0
    child.stop()


def test_a_signal_that_another_thread_gets_ends_the_wait(tmp_path):
    """As if it came just before the main thread began to wait, which then does not see it."""
    code = CHILD.replace(
        "stop.wait()",
        "other = threading.Thread(target=threading.Event().wait, daemon=True)\n"
        "other.start()\n"
        "kill = lambda: signal.pthread_kill(other.ident, signal.SIGTERM)\n"
        "threading.Timer(0.5, kill).start()\n"
        "stop.wait()",
    ).replace("import sys", "import signal, sys")
    child = process.spawn("child", [sys.executable, "-c", code], directory=tmp_path)
    child.wait_ready(20)
    assert child.process.wait(10) == 0


def test_a_child_that_fails_is_quoted(tmp_path):
    child = process.spawn("shard 7", [sys.executable, "-c", "1/0"], directory=tmp_path)
    with pytest.raises(process.ChildError, match=r"shard 7 ended with exit code 1(.|\n)*ZeroDiv"):
        child.wait_ready(20)


def test_a_child_that_hangs_is_killed(tmp_path):
    code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    child = process.spawn("deaf", [sys.executable, "-c", code], directory=tmp_path)
    with pytest.raises(process.ChildError, match="deaf was not ready within 1 s"):
        child.wait_ready(1)
    wait_until(lambda: not alive(child.pid), "it ends", 10.0)


def test_a_child_ends_when_its_parent_is_killed(tmp_path):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    pid = int(parent.stdout.readline())
    assert alive(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    wait_until(lambda: not alive(pid), "it ends", 10.0)
