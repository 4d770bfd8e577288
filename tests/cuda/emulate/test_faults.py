"""The emulation tells faults: each, planted in the device code, fails the fuzzing of its op."""

import shutil
import subprocess
from dataclasses import dataclass

import pytest

from tests.cuda.emulate import build


@dataclass(frozen=True)
class Fault:
    """New text in the place of old, which stands in a file below `cuda/` at least `nth` times."""

    op: str
    file: str
    old: str
    new: str
    nth: int = 1

    def planted(self) -> str:
        """The text of the file with the fault."""
        parts = build.sources()[self.file].split(self.old)
        assert len(parts) > self.nth, f"{self.file}: expected {self.nth} times:\n{self.old}"
        before, after = self.old.join(parts[: self.nth]), self.old.join(parts[self.nth :])
        return before + self.new + after


ROUTE, GATHER = "include/heterps/route.cuh", "include/heterps/gather.cuh"
ROWS = "include/heterps/row_threads.cuh"
EMBEDDING, QUANTIZE = "include/heterps/embedding.cuh", "include/heterps/quantize.cuh"
CACHE, FFN = "include/heterps/row_cache.cuh", "include/heterps/grouped_ffn.cuh"
TILE = "include/heterps/tile_product.cuh"
BARRIER = "__syncthreads();"

FAULTS = {
    # Barriers.
    "ranks before the tile is written": Fault("route", ROUTE, BARRIER, "", 1),
    "sums before all warps have theirs": Fault("route", ROUTE, BARRIER, "", 2),
    "sums of warps that are overwritten": Fault("route", ROUTE, "turn ^= 1", "turn ^= 0"),
    "a tile of rows that is read too soon": Fault("grouped_ffn", FFN, BARRIER, ""),
    "slabs that are overwritten": Fault("grouped_ffn", TILE, BARRIER, "", 1),
    "slabs that are read too soon": Fault("grouped_ffn", TILE, BARRIER, "", 2),
    "sums that are read too soon": Fault("grouped_ffn", TILE, BARRIER, "", 4),
    "a barrier that not all reach": Fault(
        "grouped_ffn", FFN, BARRIER, f"if (threadIdx.x < 100) {BARRIER}"
    ),
    # Lanes.
    "a mask of half a warp": Fault("gather", GATHER, "0xffffffffu", "0xffffu"),
    "a scan that is a level short": Fault("route", ROUTE, "step < kWarp", "step < kWarp / 2"),
    "a butterfly that is a level short": Fault("gather", GATHER, "step > 0", "step > 1"),
    "squares of half a row": Fault("embedding", EMBEDDING, "kLanes / 2; step", "kLanes / 4; step"),
    "the greatest of half a row": Fault(
        "quantize", QUANTIZE, "kLanes / 2; step", "kLanes / 4; step"
    ),
    "a vote of half a warp": Fault("row_cache", CACHE, "0xffffffffu", "0xffffu"),
    "a lane that returns before its warp": Fault(
        "quantize", QUANTIZE, "float most = 0", "if (lane >= dim) return;\n  float most = 0"
    ),
    # Ends and bounds.
    "a pair too many": Fault("route", ROUTE, "pair < pairs", "pair <= pairs"),
    "a token too few": Fault("route", ROUTE, "token >= tokens", "token >= tokens - 1"),
    "a row too many": Fault("gather", GATHER, "row >= rows", "row > rows"),
    "packs beyond the row": Fault("gather", GATHER, "i < packs;", "i <= packs;"),
    "threads that have half of a row": Fault(
        "gather", ROWS, "threadIdx.x & ((1u << bits) - 1)", "threadIdx.x & (1u << bits >> 1)"
    ),
    "a row of another block": Fault("embedding", ROWS, "(8 - bits)", "(7 - bits)"),
    "a dropped pair that counts": Fault("gather", GATHER, "position < 0", "position < -1"),
    "packs of rows that are not aligned": Fault(
        "gather", "src/gather.cu", "dim % kWide == 0", "dim >= kWide"
    ),
    "a bag that ends late": Fault("embedding", EMBEDDING, "j < end", "j <= end"),
    "a segment that is summed twice": Fault(
        "embedding", EMBEDDING, "|| !begins_segment(in, p)", ""
    ),
    "rows beyond the operand": Fault("grouped_ffn", TILE, "i < rows && ", ""),
    "columns beyond the operand": Fault("grouped_ffn", TILE, " && j < columns", ""),
    "rows of the next group": Fault("grouped_ffn", FFN, "row >= tile.rows || ", "", 1),
    "columns of the next row": Fault("grouped_ffn", FFN, " || column >= columns", "", 3),
    "a way too many": Fault("row_cache", CACHE, "lane < cache.ways", "lane <= cache.ways"),
    "a set that two threads admit to": Fault("row_cache", CACHE, "p > 0 && ", "p > 99 && "),
    # Numbers.
    "NaN that is chosen": Fault("route", ROUTE, "isnan(logit) ? lowest : logit", "logit"),
    "ties to the higher expert": Fault("route", ROUTE, "a.index < b.index", "a.index > b.index"),
    "infinity that has a scale": Fault("quantize", QUANTIZE, "poison == 0 ?", "true ?"),
    "a fragment that is not cleared": Fault("grouped_ffn", TILE, "sums.clear();", ""),
}


# What the order of chance may hide, and one that changes no number.
RACES = {
    "slabs that are overwritten": FAULTS["slabs that are overwritten"],
    "every lane writes the sum": Fault("gather", GATHER, "if (lane == 0) w[pair]", "w[pair]"),
}


@pytest.mark.parametrize("fault", [*FAULTS.values(), *RACES.values()], ids=[*FAULTS, *RACES])
def test_faults_still_apply(fault: Fault) -> None:
    assert fault.planted() != build.sources()[fault.file]


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("name", FAULTS)
def test_faults_are_told(name: str) -> None:
    fault = FAULTS[name]
    changed = {fault.file: fault.planted()}
    for sanitizer in ((), build.ADDRESSES):  # to the latter if need be: reads beyond an array
        command = [build.driver(sanitizer, changed), fault.op, "300", "1"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
        if done.returncode != 0:
            return
    pytest.fail("nobody noticed")


@pytest.mark.exhaustive
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("name", RACES)
def test_the_thread_sanitizer_tells_races(name: str) -> None:
    fault = RACES[name]
    program = build.driver(build.THREADS, {fault.file: fault.planted()})
    command = [program, fault.op, "5", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert "data race" in done.stderr
