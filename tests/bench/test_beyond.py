"""The benchmark of experts beyond memory: its rounds, and what is said of those that fail."""

import re
from pathlib import Path
from typing import Any

import pytest

from bench.beyond.tables import BEGIN, END, put, tables
from bench.beyond.turns import Contestant

DISK = [1e9, 3e9]


def turn(milliseconds: list[int], digest: str = "a", **stats: float) -> dict[str, Any]:
    told = {
        "hits": 3,
        "misses": 1,
        "bytes_read": 5e7,
        "bytes_wasted": 1e7,
        "waited": 0.005,
        "disk_busy": 0.03,
    }
    return {
        "seconds": [one / 1e3 for one in milliseconds],
        "digest": digest,
        "disk": DISK,
        "stats": told | stats,
    }


def decode() -> dict[str, Any]:
    return {
        "decode": {
            "8": {
                "threads": 1,
                "turns": {
                    "resident": [turn([10, 10]), turn([10, 10], "b")],
                    "cache": [turn([20, 20]), turn([25, 25], "b")],
                    "torch mmap": [turn([200, 200]), turn([250, 200])],
                    "safetensors mmap": [turn([180, 140]), turn([150, 200])],
                    "accelerate": [turn([20, 20]), turn([30, 30])],
                },
                "replayed": {"lru": 4, "belady": 1},
            }
        }
    }


def test_ours_is_compared_with_the_best_of_those_that_ran():
    shown = tables(decode())
    # 40 MB in two forwards at 2 GB/s are 10 ms each, as long as computing takes.
    assert (
        "| 1/8, threads 1, rounds 2 | 45% (40% to 50%) | 51% | 32% | 2000 (2000 to 2000) |" in shown
    )
    assert "| 1/8, threads 1, rounds 2 | 2 of 8 | 4 | 1 |" in shown
    assert "| 100.0 |  | **1.1 ×** (accelerate) | 25 / 25 | equal |" in shown
    found = decode()
    found["decode"]["8"]["turns"]["accelerate"][1] = {"failed": "killed for memory", "disk": DISK}
    shown = tables(found)
    assert "| 4.7 | 6.0 | failed: killed for memory | 100.0 |  |" in shown
    assert "**7.5 ×** (safetensors mmap)" in shown


def test_ours_that_fails_is_shown_as_failed_and_compared_with_none():
    found = decode()
    found["decode"]["8"]["turns"]["cache"] = [{"failed": "ended with 1: no", "disk": DISK}] * 2
    shown = tables(found)
    assert "| failed: ended with 1: no | 4.7 |" in shown
    assert "×" not in shown
    assert "not compared" in shown
    ring = {
        "batch": 64,
        "share": 2,
        "threads": 1,
        "turns": found["decode"]["8"]["turns"],
        "expected": [],
    }
    assert "ring failed" not in tables({"ring": {"64/2": ring | {"auto": "ring"}}})
    ring["turns"]["ring"] = ring["turns"]["cache"]
    assert "ring failed: ended with 1: no" in tables({"ring": {"64/2": ring}})


def test_a_page_has_what_was_measured_between_its_marks():
    result = decode() | {
        "machine": {"processor": "P", "cores": 2},
        "versions": {"torch": "1"},
        "model_bytes": 768 << 20,
        "date": "2026-01-01",
        "capped": True,
        "not_run": {"other": "why"},
    }
    page = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    made = put(page, result)
    assert made.startswith(f"before\n{BEGIN}\n\nP, 2 cores; torch 1; a model of 768 MiB")
    assert made.endswith(f"\n{END}\nafter\n")
    assert "old" not in made
    assert put(made, result) == made
    with pytest.raises(ValueError, match=re.escape(BEGIN)):
        put("before", result)


def test_training_is_shown_beside_what_the_disk_allows():
    one = {"resident": 1.0, "seconds": 4.0, "read": 4e9, "written": 1e9}
    one |= {"disk": [2e9, 2e9], "disk_writes": [1e9, 1e9]}
    found = {"memory": 1 << 20, "batch": 8, "rounds": [one] * 3, "equal": True}
    assert "| 4000 / 1000 | 75% (75% to 75%) | equal |" in tables({"train": found})
    assert "different" in tables({"train": found | {"equal": False}})
    assert tables({"train": {"rounds": []}}) == ""


def test_other_bits_in_one_round_are_told():
    found = decode()
    found["decode"]["8"]["turns"]["cache"][1]["digest"] = "c"
    assert "| different |" in tables(found)


def test_a_contestant_that_dies_says_of_what(tmp_path: Path, monkeypatch):
    nothing = tmp_path / "experts.heterps"
    nothing.write_bytes(b"x")
    one = Contestant("cache", tmp_path, 1 << 20)
    try:
        one.ready()
        assert "No such file" in one.failed
        assert one.failed.startswith("ended with 1")
        assert one.run(3) == {"failed": one.failed}
    finally:
        one.close()


def test_rounds_are_gone_on_with_until_all_are_there(tmp_path: Path, monkeypatch):
    """Without contestants: what is run, of which tokens, and what is kept."""
    from bench.beyond import __main__ as beyond
    from bench.beyond.contestants import EXPERTS, LAYERS
    from workers.offload.choice.trace import Call, Trace, TracedLayer

    layers = tuple(TracedLayer(str(i), EXPERTS, 1) for i in range(LAYERS))
    calls = tuple(
        Call(i, 1, (t * 7 % EXPERTS, (t * 7 + 1 + i) % EXPERTS))
        for t in range(1000)
        for i in range(LAYERS)
    )
    monkeypatch.setattr(beyond, "read_trace", lambda _: Trace(layers, calls))
    began: list[int] = []

    class Field:
        resident_before = 0

        def run(self, forwards: int) -> dict[str, Any]:
            return {"seconds": [0.01] * forwards, "digest": "a"} | {
                "stats": {"hits": 1, "misses": 2}
            }

        def close(self) -> None:
            pass

    def enter(names, work, memory, batch=1, first=0, later=None):
        began.append(first)
        return {name: Field() for name in names}

    class Disk:
        def __init__(self, work: Path) -> None:
            pass

        def speed(self, seconds: float) -> float:
            return 1.0

    monkeypatch.setattr(beyond, "enter", enter)
    monkeypatch.setattr(beyond, "Disk", Disk)
    found: dict[str, Any] = {}
    kept: list[int] = []

    def keep() -> None:
        kept.append(len(found["8"]["turns"]["cache"]))

    def sit(seconds: float) -> bool:
        until = beyond.time.monotonic() + seconds
        return beyond.decode(beyond.Sitting(tmp_path, 3, until, keep), [8], found)

    assert not sit(-1)
    assert not began
    patched = iter([False, True, True])
    with monkeypatch.context() as patch:
        patch.setattr(beyond.Sitting, "is_over", property(lambda _: next(patched)))
        assert not sit(60)
    assert kept[-1] == 1
    assert sit(60)
    assert [len(turns) for turns in found["8"]["turns"].values()] == [3] * 6
    assert began == [0, beyond.WARM + beyond.FORWARDS]
    assert sit(60)
    assert len(began) == 2
    needed = 3 * beyond.FORWARDS * LAYERS * 2
    assert found["8"]["replayed"]["belady"] <= found["8"]["replayed"]["lru"] <= needed
