"""Ctrl-C ends the wait for a disk that hangs, and what was interrupted can be repeated."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from workers.offload.experts.layout import ExpertFileError
from workers.offload.experts.trained import TrainedExperts

LIMIT_S = 120  # only a hang reaches it

# Reads hang, in the threads that read, while `goes_on` is not set.
_HANGS = """
import gc, signal, sys, threading, warnings
import torch
from heterps import MoE, offload, pack_experts
from workers.offload.experts.layout import view_of
from workers.offload.experts.packed import PackedExperts, aligned
from workers.offload.slots.readers import Read, Readers

warnings.simplefilter("ignore")
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where tests run in background
path, mode = sys.argv[1:]
main, goes_on, begun = threading.main_thread(), threading.Event(), threading.Event()
goes_on.set()
real = PackedExperts.native_read

def native_read(*given):
    def hold(*_):
        assert threading.current_thread() is not main
        if not goes_on.is_set():
            begun.set()
            goes_on.wait()

    return real(*given, hold)

PackedExperts.native_read = native_read

def say(what):
    print(what, flush=True)

def interrupted(work):
    begun.wait()
    say("hangs")
    try:
        work()
    except KeyboardInterrupt:
        say("interrupted")
    else:
        say("went on")
"""

_MODEL = (
    _HANGS
    + """
model = MoE(16, 8, 16, k=8, seed=1).eval()
[layer] = pack_experts(model, path)
x = torch.randn(3, 16)
with torch.no_grad():
    expected = model(x)
    store = offload(model, 3 * layer.extent, path=path, mode=mode, ahead=False)
    assert torch.equal(model(x), expected)
    goes_on.clear()
    threading.Thread(target=lambda: (begun.wait(), say("hangs")), daemon=True).start()
    try:
        for _ in range(9):  # some may be in memory
            model(x)
    except KeyboardInterrupt:
        say("interrupted")
    interrupted(lambda: model(x))
    goes_on.set()
    for _ in range(3):
        assert torch.equal(model(x), expected)
    say("equal")
    goes_on.clear()
    begun.clear()
    threading.Thread(target=lambda: (begun.wait(), say("hangs")), daemon=True).start()
    try:
        for _ in range(9):
            model(x)
    except KeyboardInterrupt:
        say("interrupted")
    interrupted(store.close)
    goes_on.set()
    store.close()
    say("closed")
"""
)

_TRAINING = (
    _HANGS
    + """
from heterps import offload_training
from workers.offload.experts.trained import TrainedExperts

PackedExperts.native_read = real
real = TrainedExperts.native_write
TrainedExperts.native_write = native_read
model = MoE(16, 8, 16, k=1, seed=1)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
handle = offload_training(model, optimizer, 4 * 4096, path=path)
assert handle.slots == 2

def step():
    model(torch.randn(200, 16)).sum().backward()
    optimizer.step()

step()
goes_on.clear()
threading.Thread(target=lambda: (begun.wait(), say("hangs")), daemon=True).start()
try:
    step()
except KeyboardInterrupt:
    say("interrupted")
interrupted(handle.close)
goes_on.set()
handle.close()
say("closed")
"""
)

_FORGOTTEN = (
    _HANGS
    + """
[layer] = pack_experts(MoE(16, 4, 16, seed=1), path)
packed, readers = PackedExperts(path), Readers(2)
read = Read(packed, 0, 0, 1, [view_of(aligned(layer.extent))])
goes_on.clear()
readers.begin(read)
begun.wait()
say("hangs")
del readers
say("interrupted")
goes_on.set()
while not read.done:
    pass
assert read.error is None
w1 = layer.tensors[0].of(torch.frombuffer(read.into[0], dtype=torch.uint8))
assert torch.equal(w1, packed.expert("", 1)["w1"])
say("read")
"""
)


def _interrupt(script: str, *arguments: str) -> tuple[list[str], str]:
    """What it says but "hangs", after which it is interrupted; and what it says of errors."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    watch = threading.Timer(LIMIT_S, process.kill)
    watch.start()
    said = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if line.strip() == "hangs":
                time.sleep(0.3)  # so that it waits
                process.send_signal(signal.SIGINT)
            else:
                said.append(line.strip())
        errors = process.communicate()[1]
    finally:
        watch.cancel()
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    return said, errors


@pytest.mark.parametrize("mode", ["cache", "ring"])
def test_a_forward_and_a_close_are_interrupted_and_repeated(tmp_path: Path, mode: str) -> None:
    said, _ = _interrupt(_MODEL, str(tmp_path / "experts"), mode)
    assert said == ["interrupted"] * 2 + ["equal"] + ["interrupted"] * 2 + ["closed"]


def test_threads_that_hang_are_left_behind_with_their_memory(tmp_path: Path) -> None:
    said, errors = _interrupt(_FORGOTTEN, str(tmp_path / "experts"), "")
    assert said == ["interrupted", "read"]
    assert "KeyboardInterrupt" in errors


def test_a_step_is_interrupted_while_a_write_hangs_and_so_is_the_close(tmp_path: Path) -> None:
    """What was trained is not taken for whole."""
    said, _ = _interrupt(_TRAINING, str(tmp_path / "experts"), "")
    assert said == ["interrupted"] * 2 + ["closed"]
    with pytest.raises(ExpertFileError, match="broken off"):
        TrainedExperts(tmp_path / "experts")
