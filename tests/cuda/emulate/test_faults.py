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
ROWS, RUN = "include/heterps/row_threads.cuh", "include/heterps/run.cuh"
EMBEDDING, QUANTIZE = "include/heterps/embedding.cuh", "include/heterps/quantize.cuh"
CACHE, FFN = "include/heterps/row_cache.cuh", "include/heterps/grouped_ffn.cuh"
TILE, PLAIN = "include/heterps/tile_product.cuh", "include/heterps/tile_plain.cuh"
PRODUCT, STEPS = "include/heterps/grouped_product.cuh", "include/heterps/ffn_steps.cuh"
TENSOR = "include/heterps/tile_tensor.cuh"
BARRIER = "__syncthreads();"

FAULTS = {
    # Barriers.
    "ranks before the tile is written": Fault("route", ROUTE, BARRIER, "", 1),
    "sums before all warps have theirs": Fault("route", ROUTE, BARRIER, "", 2),
    "sums of warps that are overwritten": Fault("route", ROUTE, "turn ^= 1", "turn ^= 0"),
    "slabs that are overwritten": Fault("grouped_ffn", PLAIN, BARRIER, "", 1),
    "slabs that are read too soon": Fault("grouped_ffn", PLAIN, BARRIER, "", 2),
    "slabs of others that are read too soon": Fault("grouped_ffn", TENSOR, BARRIER, ""),
    "sums that overwrite slabs": Fault("grouped_ffn", TILE, BARRIER, "", 1),
    "sums that are read too soon": Fault("grouped_ffn", TILE, BARRIER, "", 2),
    "gates that overwrite slabs": Fault("grouped_ffn", TILE, BARRIER, "", 3),
    "gates that are read too soon": Fault("grouped_ffn", TILE, BARRIER, "", 4),
    "a barrier that not all reach": Fault(
        "grouped_ffn", TENSOR, BARRIER, f"if (threadIdx.x < 100) {BARRIER}"
    ),
    # Copies that go on by themselves.
    "copies that are not awaited": Fault("grouped_ffn", TENSOR, "kStages - 2>", "kStages - 1>"),
    "copies into what is read": Fault("grouped_ffn", TENSOR, "int stage = 1", "int stage = 0"),
    "copies of no group": Fault("grouped_ffn", TENSOR, "end_group_of_copies();", ""),
    "copies from beyond the operand": Fault(
        "grouped_ffn", TENSOR, "from[n], room > 0", "from[n], true"
    ),
    "copies that are not aligned": Fault(
        "grouped_ffn",
        TENSOR,
        "aligned = reinterpret_cast<uintptr_t>(operand.data) % 16 == 0 &&",
        "aligned =",
    ),
    # Lanes.
    "a mask of half a warp": Fault("gather", GATHER, "0xffffffffu", "0xffffu"),
    "a scan that is a level short": Fault("route", ROUTE, "step < kWarp", "step < kWarp / 2"),
    "a butterfly that is a level short": Fault("gather", GATHER, "step > 0", "step > 1"),
    "squares of half a row": Fault("embedding", EMBEDDING, "kLanes / 2; step", "kLanes / 4; step"),
    "the greatest of half a row": Fault(
        "quantize", QUANTIZE, "kLanes / 2; step", "kLanes / 4; step"
    ),
    "a tile of another group": Fault("grouped_ffn", FFN, "kAll, upto, kLanes - 1", "kAll, upto, 0"),
    "a tile twice": Fault("grouped_ffn", FFN, "tile - upto + tiles", "tile - upto"),
    "matrices that are not transposed": Fault(
        "grouped_ffn", TENSOR, "load_matrices<!kDeep>", "load_matrices<kDeep>"
    ),
    "halves of the depth that are swapped": Fault(
        "grouped_ffn", TENSOR, "matrix % 2, matrix / 2", "matrix / 2, matrix % 2"
    ),
    "a vote of half a warp": Fault("row_cache", CACHE, "0xffffffffu", "0xffffu"),
    "a lane that returns before its warp": Fault(
        "quantize", QUANTIZE, "float most = 0", "if (lane >= dim) return;\n  float most = 0"
    ),
    # Ends and bounds.
    "a pair too many": Fault("route", ROUTE, "pair < pairs", "pair <= pairs"),
    "a token too few": Fault("route", ROUTE, "token >= tokens", "token >= tokens - 1"),
    "a row too many": Fault("gather", GATHER, "token >= tokens", "token > tokens"),
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
    "lines beyond the operand": Fault("grouped_ffn", PLAIN, "line < operand.extent && ", ""),
    "depth beyond the operand": Fault(
        "grouped_ffn", PLAIN, " && k + d < depth", " && k + d <= depth"
    ),
    "elements beyond the line": Fault("grouped_ffn", TENSOR, "i < room ?", "true ?"),
    "values that are gates": Fault("grouped_ffn", TENSOR, "0 : operand.gated", "0 : 0"),
    "gates of other units": Fault(
        "grouped_ffn", TENSOR, "line / (2 * kGateRun)", "line / kGateRun"
    ),
    "a warp that is idle too soon": Fault(
        "grouped_ffn", TENSOR, "first_row() >= left.extent", "first_row() + 1 >= left.extent"
    ),
    "rows of the next group": Fault("grouped_ffn", FFN, "row >= tile.rows || ", "", 1),
    "columns of the next row": Fault("grouped_ffn", FFN, " || column >= columns", "", 3),
    "runs that are not whole": Fault("grouped_ffn", RUN, "widths % kRun<T> == 0", "widths >= 0"),
    "rows of the second half": Fault(
        "grouped_ffn", TILE, "first < rows && ", "first < (rows < 64 ? rows : 64) && "
    ),
    "a way too many": Fault("row_cache", CACHE, "lane < cache.ways", "lane <= cache.ways"),
    "a set that two threads admit to": Fault("row_cache", CACHE, "p > 0 && ", "p > 99 && "),
    # Graphs.
    "a host that looks at offsets": Fault(
        "grouped_ffn",
        "src/grouped_ffn.cu",
        "if (shape.rows == 0 || shape.dim == 0) return;",
        "if (arrays.offsets[shape.groups] != shape.rows || shape.dim == 0) return;",
    ),
    # What the products of Hopper are told, and the steps between them.
    "groups that begin elsewhere": Fault("grouped_ffn", PRODUCT, "first * depth", "e * depth"),
    "weights of an empty group that are left": Fault(
        "grouped_ffn",
        PRODUCT,
        "if (offsets[e] < offsets[e + 1]) return;",
        "if (offsets != nullptr) return;",
    ),
    "weights that are zeroed": Fault(
        "grouped_ffn",
        PRODUCT,
        "if (offsets[e] < offsets[e + 1]) return;",
        "if (offsets[e] <= offsets[e + 1]) return;",
    ),
    "pitches of the other layout": Fault(
        "grouped_ffn", PRODUCT, "? depth : width;", "? width : width;"
    ),
    "a step that is a run short": Fault("grouped_ffn", STEPS, "run >= runs", "run >= runs - 1"),
    "a gradient that is read too late": Fault(
        "grouped_ffn", STEPS, "load_run(grad, act", "load_run(grad, pre"
    ),
    # Numbers.
    "NaN that is chosen": Fault("route", ROUTE, "isnan(logit) ? lowest : logit", "logit"),
    "ties to the higher expert": Fault("route", ROUTE, "a.index < b.index", "a.index > b.index"),
    "infinity that has a scale": Fault("quantize", QUANTIZE, "poison == 0 ?", "true ?"),
    "sums that do not begin at zero": Fault("grouped_ffn", TENSOR, "sum = 0;", "(void)sum;"),
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
