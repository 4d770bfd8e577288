"""Forked processes are as those that are started: their own, watched, ended with their parent."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from chassis.bounded_log import BoundedLog
from chassis.forking import ForkError, ForkServer
from tests.pids import alive
from tests.waiting import wait_until

MODULE = """
import ctypes, json, os, random, sys, threading, time
import numpy
from chassis.process import announce, lifeline
LOADED_BY = os.getpid()

def main(argv):
    given, ready = argv[0], argv[argv.index("--ready-file") + 1]
    lifeline()
    print("printed by", given, flush=True)
    announce(ready, given=given, loaded_by=LOADED_BY, session=os.getsid(0),
             word=os.environ.get("WORD"), lost=os.environ.get("SERVERS"),
             shown=open("/proc/self/cmdline").read().rstrip("\\0").split("\\0"),
             drawn=[random.random(), numpy.random.rand()], threads=threading.active_count())
    if given.isdecimal():
        return int(given)
    if given == "stuck":
        ctypes.PyDLL(None).sleep(600)  # with the interpreter's lock
    time.sleep(600)
"""
FULL = """
real = os.fork
def fork():
    if os.path.exists({gate!r}):
        raise BlockingIOError(11, "no more processes")
    return real()
os.fork = fork
"""


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Makes fork servers of a module of this text."""
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    made = []

    def make(text=MODULE):
        name = f"forked{len(made)}"
        (tmp_path / f"{name}.py").write_text(text)
        made.append(ForkServer(name, tmp_path, {"OPENBLAS_NUM_THREADS": "1", "SERVERS": "alone"}))
        return made[-1]

    yield make
    for server in made:
        server.close()


def start(server, folder, given, **environment):
    log = BoundedLog(folder / f"{given}.log")
    program = server._module
    return server.spawn(given, program, [given], directory=folder, environment=environment, log=log)


def ready(child):
    return child.wait_ready(120)


def test_a_forked_process_is_its_own(serve, tmp_path):
    server = serve()
    children = [ready(start(server, tmp_path, name, WORD=name)) for name in ("one", "two", "three")]
    for child in children:
        facts = child.facts
        assert facts["pid"] == child.pid == facts["session"]
        assert (facts["given"], facts["word"], facts["lost"]) == (child.label, child.label, None)
        assert child.poll() is None
        run = ["-P", "-m", "forked0", child.label, "--ready-file", str(child.ready_file)]
        assert facts["shown"] == [sys.executable, *run]
    assert len({json.dumps(child.facts["drawn"]) for child in children}) == 3
    assert len({child.facts["drawn"][1] for child in children}) == 3
    assert len({child.facts["loaded_by"] for child in children}) == 1, "imported once"
    one, two, three = children
    one.process.terminate()
    assert one.process.wait(60) == -signal.SIGTERM
    os.kill(two.pid, signal.SIGKILL)
    assert two.process.wait(60) == -signal.SIGKILL
    three.process.stdin.close()  # as it does when the parent dies
    assert three.process.wait(60) == 3
    assert "printed by three" in three.log.read_text()
    three.stop()


def test_a_server_that_was_started_before_forks_the_first_process(serve, tmp_path):
    server = serve()
    server.warm()
    started = server._process.pid
    server.warm()
    child = ready(start(server, tmp_path, "one"))
    assert child.facts["loaded_by"] == started == server._process.pid
    child.stop()
    server.close()
    server.warm()
    wait_until(lambda: not alive(started), "the server ends")
    assert server._process.pid == started


def test_exit_codes_are_told_however_soon(serve, tmp_path):
    server = serve()
    children = [start(server, tmp_path, str(code)) for code in range(20)]
    assert [child.process.wait(60) for child in children] == list(range(20))


def test_the_end_of_the_server_is_that_of_all_and_the_next_process_has_another(serve, tmp_path):
    server = serve()
    child = ready(start(server, tmp_path, "first"))
    os.kill(child.facts["loaded_by"], signal.SIGKILL)
    assert child.process.wait(60) == -signal.SIGKILL
    wait_until(lambda: not alive(child.pid), "the kernel ends it")
    again = None
    while again is None:
        try:
            again = ready(start(server, tmp_path, "second"))
        except ForkError:  # asked before its end was seen
            continue
    assert again.facts["loaded_by"] != child.facts["loaded_by"]
    server.close()
    wait_until(lambda: not alive(again.facts["loaded_by"]), "the server ends")


def test_one_that_cannot_notice_that_its_parent_is_gone_ends_with_it(serve, tmp_path):
    server = serve()
    child = ready(start(server, tmp_path, "stuck"))
    server._hang_up()  # as the kernel does
    wait_until(lambda: not alive(child.pid), "the kernel ends it")


def test_one_that_was_killed_before_it_forked_anything_has_a_next(serve, tmp_path):
    server = serve()
    server.warm()
    first = server._process.pid
    os.kill(first, signal.SIGKILL)
    wait_until(lambda: not alive(first), "it is dead")
    child = None
    while child is None:
        try:
            child = ready(start(server, tmp_path, "one"))
        except ForkError:  # asked before its end was seen
            continue
    assert child.facts["loaded_by"] != first
    child.stop()


def test_a_server_that_imports_ends_with_its_client(serve, tmp_path):
    begun, slow = tmp_path / "begun", "open({!r}, 'w').close()\nimport time\ntime.sleep(600)\n"
    server = serve(slow.format(str(begun)))
    server.warm()
    wait_until(begun.exists, "it imports")
    server._hang_up()  # as the kernel does
    wait_until(lambda: not alive(server._process.pid), "the server ends")


def test_what_is_asked_while_a_server_imports_is_done_after_that(serve, tmp_path):
    gate = tmp_path / "gate"
    wait = f"import os, time\nwhile not os.path.exists({str(gate)!r}): time.sleep(0.01)\n"
    server = serve(wait + MODULE)
    with ThreadPoolExecutor(1) as asking:
        asked = asking.submit(start, server, tmp_path, "one")
        wait_until(lambda: server._process is not None, "it is started")
        time.sleep(0.5)  # so that the signal of a message comes while it imports
        gate.touch()
        child = ready(asked.result())
    assert child.facts["given"] == "one"
    child.stop()


def test_a_fork_that_fails_harms_no_other_process(serve, tmp_path):
    gate = tmp_path / "full"
    server = serve(MODULE + FULL.format(gate=str(gate)))
    first = ready(start(server, tmp_path, "first"))
    gate.touch()
    for _ in range(2):
        with pytest.raises(ForkError, match="no process"):
            start(server, tmp_path, "none")
    gate.unlink()
    second = ready(start(server, tmp_path, "second"))
    assert second.facts["loaded_by"] == first.facts["loaded_by"]
    assert first.poll() is None
    assert "no more processes" in (tmp_path / "fork-server.log").read_text()


@pytest.mark.parametrize("when", ["before it runs", "once it runs"])
def test_closing_does_not_wait_for_a_server_that_hangs(serve, tmp_path, monkeypatch, when):
    server = serve("import time\ntime.sleep(600)")
    started, closing = threading.Event(), threading.Event()
    popen = subprocess.Popen

    def start_slowly(*args, **options):
        started.set()
        if when == "before it runs":
            assert closing.wait(60)
        return popen(*args, **options)

    monkeypatch.setattr("chassis.forking.subprocess.Popen", start_slowly)
    with ThreadPoolExecutor(2) as pool:
        asked = pool.submit(start, server, tmp_path, "none")
        assert started.wait(60)
        if when == "once it runs":
            wait_until(lambda: server._connection is not None, "it is started")
        closed = pool.submit(server.close)
        wait_until(lambda: server._closed, "it is closed")
        closing.set()
        with pytest.raises(ForkError):
            asked.result(60)
        closed.result(60)
    with pytest.raises(ForkError, match="closed"):
        start(server, tmp_path, "another")


@pytest.mark.parametrize(
    "text",
    [
        "import threading\nthreading.Timer(60, print).start()",
        "raise ImportError('nothing of that name')",
    ],
    ids=["a thread", "an error"],
)
def test_what_cannot_be_forked_is_not(serve, tmp_path, text):
    server = serve(text)
    for _ in range(2):
        with pytest.raises(ForkError, match="fork"):
            start(server, tmp_path, "none")
