"""Threads without an interpreter that read experts: what comes, what is wrong, and how they end."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path
from threading import Event
from typing import Any
from zlib import crc32

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heterps import MoE, pack_experts
from workers.offload.engine import _reads
from workers.offload.experts.layout import ExpertFileError, view_of
from workers.offload.experts.packed import PackedExperts, aligned
from workers.offload.slots.readers import Read, Readers


@given(data=st.binary(max_size=300), at=st.integers(0, 20))
def test_the_checksum_is_that_of_zlib(data: bytes, at: int) -> None:
    assert _reads.checksum(data) == crc32(data)
    assert _reads.checksum(memoryview(data)[at:]) == crc32(data[at:])


def test_a_file_that_ends_early_is_told_by_the_expert(tmp_path: Path) -> None:
    [layer] = pack_experts(MoE(16, 4, 16, seed=1), tmp_path / "experts")
    with PackedExperts(tmp_path / "experts") as packed, Readers(2) as readers:
        os.truncate(tmp_path / "experts", layer.at(2))
        extents = [aligned(layer.extent) for _ in range(3)]
        read = Read(packed, 0, 0, 1, [view_of(one) for one in extents])
        readers.begin(read)
        readers.wait(read)
        error = read.error
        assert isinstance(error, ExpertFileError)
        # Of the two that are missing, whichever was read first.
        assert re.search("expert [23]: the file is cut short", str(error))


def test_what_the_system_says_of_a_read_is_an_oserror(tmp_path: Path) -> None:
    pack_experts(MoE(16, 4, 16, seed=1), tmp_path / "experts")
    packed = PackedExperts(tmp_path / "experts")
    read = Read(packed, 0, 0, 0, [view_of(aligned(packed.layers[0].extent))])
    packed.close()
    with Readers(1) as readers:
        readers.begin(read)
        readers.wait(read)
    error = read.error
    assert isinstance(error, OSError)
    assert error.filename == packed.path


@pytest.mark.parametrize("forgets", ["read", "readers", "both"])
def test_what_is_forgotten_while_it_is_read_keeps_its_memory(tmp_path: Path, forgets: str) -> None:
    [layer] = pack_experts(MoE(16, 4, 16, seed=1), tmp_path / "experts")
    begun, goes_on = Event(), Event()

    class Held(PackedExperts):
        def native_read(self, *given: Any) -> _reads.Transfer:
            def hold(*_: int) -> None:
                begun.set()
                goes_on.wait()

            return super().native_read(*given, hold)

    with Held(tmp_path / "experts") as packed:
        readers = Readers(1, ahead=True)
        into = view_of(aligned(layer.extent))
        read = Read(packed, 0, 0, 0, [into])
        ahead = Read(packed, 1, 0, 1, [view_of(aligned(layer.extent))])
        readers.begin(read)
        readers.begin_ahead(ahead)
        begun.wait()
        goes_on.set()
        if forgets != "readers":
            del read, ahead
        if forgets != "read":
            del readers
        gc.collect()
        if forgets == "both":  # the threads have ended, so it is there
            w1 = layer.tensors[0].of(torch.frombuffer(into, dtype=torch.uint8))
            assert torch.equal(w1, packed.expert("", 0)["w1"])


def test_a_fork_does_not_wait_for_threads_that_it_has_not(tmp_path: Path) -> None:
    code = """
import os
from workers.offload.slots.readers import Readers
readers = Readers(3, ahead=True)
child = os.fork()
if child == 0:
    del readers
    os._exit(7)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
readers.close()
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=60)
