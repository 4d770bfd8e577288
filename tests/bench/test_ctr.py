"""The benchmark of training: its data, its job, what peers are held against, and its page."""

import itertools
import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

from bench.answering import PeerError
from bench.ctr.check import Expected, Verdict, trained
from bench.ctr.ours import write_job
from bench.ctr.processes import Peer
from bench.ctr.processors import SHARD, WORKER, Processors
from bench.ctr.report import page
from bench.ctr.roster import AT_ONCE, DENSE, ENTRIES, MAIN, OURS, TBE, TBE_ONE, title
from bench.ctr.shape import (
    ACCUMULATOR,
    BATCH,
    DENSE_RATE,
    EACH,
    EPSILON,
    LEARNING_RATE,
    SLOTS,
    Data,
    first_layers,
    first_rows,
)
from bench.ctr.targets import targets
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


def test_slots_have_rows_of_their_own_and_popular_ones(tmp_path: Path) -> None:
    data = Data.drawn(1)
    assert data.rows.shape == (BATCH, SLOTS)
    assert (data.rows // EACH == np.arange(SLOTS)).all()
    _, counts = np.unique(data.rows[:, 0], return_counts=True)
    assert counts.max() > 20 * np.median(counts)
    data.save(tmp_path / "data.npz")
    again = Data.load(tmp_path / "data.npz")
    assert (again.rows == data.rows).all()
    assert (again.labels == data.labels).all()


def test_all_begin_with_the_same_rows_and_layers() -> None:
    assert np.array_equal(first_rows(3), first_rows(3))
    assert not np.array_equal(first_rows(3), first_rows(4))
    for (weight, bias), (again, of_bias) in zip(first_layers(), first_layers(), strict=True):
        assert weight.shape == (len(bias), weight.shape[1])
        assert np.array_equal(weight, again)
        assert np.array_equal(bias, of_bias)


def test_a_job_reads_what_the_others_have(tmp_path: Path) -> None:
    from workers.data import Dataset

    data = Data.drawn(1)
    job = write_job(tmp_path / "job", data, OURS["2+2"])
    assert (job.schedule.elastic.min, job.schedule.elastic.max, job.servers.shards) == (2, 2, 2)
    assert job.train.staleness == 1
    assert write_job(tmp_path / "job", data, OURS["2+2 S0"]).train.staleness == 0
    job = write_job(tmp_path / "job", data, OURS[MAIN])
    assert [(kind.name, kind.threads) for kind in job.schedule.offered.types] == [
        ("cpu1", 1),
        ("cpu2", 2),
    ]
    assert set(job.schedule.pin.values()) == {"cpu2"}
    read = Dataset.of(job, "train")
    assert read.rows == BATCH


class Small:
    """A network of few rows, and PyTorch's training of it."""

    def __init__(self) -> None:
        rng = np.random.default_rng(5)
        self.rows = rng.uniform(-0.01, 0.01, (60, 4)).astype(np.float32)
        self.layers = [
            (
                rng.uniform(-0.3, 0.3, (outputs, inputs)).astype(np.float32),
                rng.uniform(-0.3, 0.3, outputs).astype(np.float32),
            )
            for inputs, outputs in itertools.pairwise((3 * 4 + 2, 8, 6, 1))
        ]
        # The first rows are popular, and come several times in a sample's batch.
        self.steps = [
            (
                (60 * rng.random((512, 3)) ** 3).astype(np.int64),
                rng.standard_normal((512, 2)).astype(np.float32),
                rng.integers(0, 2, 512).astype(np.float32),
            )
            for _ in range(5)
        ]

    def expected(self) -> Expected:
        losses, after = trained(self.rows.astype(np.float64), self.layers, self.steps)
        return Expected(losses, self.rows.astype(np.float64), after, np.arange(60) // 30)

    def torch(
        self, rate: float = LEARNING_RATE, row_wise: bool = False, half: bool = False
    ) -> tuple[list[float], NDArray[Any]]:
        """Losses and rows by PyTorch; of half of each batch's gradients, or of row-wise Adagrad."""
        rows = torch.from_numpy(self.rows.copy()).requires_grad_()
        squares = torch.full_like(rows, ACCUMULATOR)
        parts: list[nn.Module] = []
        for weight, bias in self.layers:
            layer = nn.Linear(*reversed(weight.shape))
            layer.load_state_dict(
                {"weight": torch.from_numpy(weight), "bias": torch.from_numpy(bias)}
            )
            parts += [layer, nn.ReLU()]
        top = nn.Sequential(*parts[:-1])
        adam = torch.optim.Adam(top.parameters(), DENSE_RATE)
        losses = []
        for positions, dense, labels in self.steps:
            rows.grad = None
            adam.zero_grad()
            vectors = rows[torch.from_numpy(positions)].flatten(1)
            logits = top(torch.cat([vectors, torch.from_numpy(dense)], 1)).squeeze(1)
            loss = binary_cross_entropy_with_logits(logits, torch.from_numpy(labels))
            loss.backward()
            adam.step()
            assert rows.grad is not None
            grad = rows.grad * (0.5 if half else 1.0)
            square = grad * grad
            squares += square.mean(1, keepdim=True) if row_wise else square
            with torch.no_grad():
                rows -= rate * grad / (squares.sqrt() + EPSILON)
            losses.append(float(loss.detach()))
        return losses, rows.detach().numpy()


def test_what_pytorch_trains_is_right() -> None:
    small = Small()
    assert small.expected().held(*small.torch()).right


@pytest.mark.parametrize(
    "otherwise", [{"rate": 1.05 * LEARNING_RATE}, {"row_wise": True}, {"half": True}, {"rate": 0.0}]
)
def test_another_optimizer_is_found(otherwise: Mapping[str, Any]) -> None:
    small = Small()
    assert not small.expected().held(*small.torch(**otherwise)).right


def test_losses_and_rows_are_both_looked_at() -> None:
    small = Small()
    wanted, (losses, rows) = small.expected(), small.torch()
    assert not wanted.held([loss + 1e-4 for loss in losses], rows).right
    assert not wanted.held(losses, np.full_like(rows, np.nan)).right
    stale = rows.copy()
    stale[30:] = small.rows[30:]
    assert not wanted.held(losses, stale).right  # rows of one slot
    stale = rows.copy()
    stale[::3] = small.rows[::3]
    assert not wanted.held(losses, stale).right  # some rows of all slots
    assert not Verdict(float("nan"), 0.0, 0.0).right
    with pytest.raises(ValueError, match="4 losses and rows of shape"):
        wanted.held(losses[1:], rows)


def test_a_peer_that_is_not_installed_says_so(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="--install-peers"):
        Peer(ENTRIES["tfra"], tmp_path / "data.npz", tmp_path / "nothing", tmp_path)


def test_a_peer_that_ends_is_told_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match=r"ended with exit code 1: .*missing\.npz"):
        Peer(ENTRIES["plain"], tmp_path / "missing.npz", tmp_path, tmp_path)


def test_processor_seconds_are_those_of_workers_and_shards() -> None:
    burn = (
        "import sys, time; sys.stdin.readline(); first = time.monotonic(), time.process_time()\n"
        "while time.process_time() < first[1] + 1.0: pass\n"
        "print(*first, time.monotonic(), time.process_time(), flush=True); sys.stdin.readline()"
    )
    argv = [sys.executable, "-c", burn, SHARD]
    with Processors() as used:
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert child.stdin is not None
        assert child.stdout is not None
        wait_until(lambda: _seen(used, child.pid), "the child is watched")
        child.stdin.write("\n")
        child.stdin.flush()
        began, before, ended, after = map(float, child.stdout.readline().split())
        wait_until(lambda: child.pid in used.seconds(SHARD, (began, ended)), "all of it was seen")
        child.communicate("\n")
    found = used.seconds(SHARD, (began, ended))[child.pid]
    assert found == pytest.approx(after - before, abs=0.25)
    assert child.pid not in used.seconds(WORKER, (began, ended))
    assert child.pid not in used.seconds(SHARD, (began - 100.0, ended))


def _seen(used: Processors, pid: int) -> bool:
    """Whether a shard is watched by now."""
    now = time.monotonic()
    time.sleep(0.3)
    return pid in used.seconds(SHARD, (now, now))


def _rounds() -> list[dict[str, dict[str, float]]]:
    rates = [(20.0, 10.0), (40.0, 10.0), (30.0, 30.0)]
    return [
        {
            "2+2": {"samples_per_s": 1e3 * ours},
            MAIN: {"samples_per_s": 3e3 * ours, "cpu_s": 0.1, "server_cpu_s": 0.03},
            AT_ONCE: {"samples_per_s": 2.6e3 * ours},
            "plain": {"samples_per_s": 1e3 * plain, "cpu_s": 0.25},
            TBE: {"samples_per_s": 50e3},
            DENSE: {"samples_per_s": 1.0, "cpu_s": 0.08}
            | {"flop_per_cpu_s": 90.0, "best_flop_per_cpu_s": 100.0},
        }
        for ours, plain in rates
    ]


def test_the_page_has_medians_of_ratios_and_who_did_not_run(tmp_path: Path) -> None:
    checked = {"steps": 5, "samples": 512, "loss": 2e-5, "rows": 5e-3, "slot": 0.2}
    found = {
        "date": "2026-01-01",
        "machine": {"processor": "p", "cores": 2},
        "versions": {"torch": "2"},
        "settings": {"batch": BATCH, "checked": checked},
        "rounds": _rounds(),
        "checks": {"plain": {"loss": 1e-7, "rows": 2e-5, "slot": 0.04}},
        "failed": {"tfra": "not installed"},
    }
    flights = tmp_path / "train.json"
    of_flights = {"date": "d", "machine": {"processor": "q", "cores": 2}, "versions": {}}
    rounds = [{"heterps": 3.0, "plain": 2.0}]
    flights.write_text(json.dumps({**of_flights, "ratio": 1.5, "at_once": 0.85, "rounds": rounds}))
    text = page(found, tmp_path, flights).read_text()
    assert "| PyTorch, one process, two threads | 10.0 | 6.00 | 2.00 | 250 |" in text
    assert "| HeterPS, 2 workers + 2 shards, staleness 1 | 30.0 | 3.00 | 1.00 |  |" in text
    assert f"| {title(MAIN)} | 90.0 | 1.00 | 0.33 | 100 + 30 |" in text
    assert "- TFRA, worker + server: not run: not installed" in text
    assert "| PyTorch, one process, two threads | 1e-07 | 2e-05 | 4e-02 |" in text
    assert "| rate over TFRA, worker + server | >= 1.3 | not run |  |" in text
    assert "| rate at staleness 0 over that at staleness 1 | >= 0.9 | 0.867 | **not met** |" in text
    assert ">= 1.2: met. At staleness 0 it has 0.85" in text


@pytest.mark.parametrize(("one", "limit"), [(30e3, ">= 1"), (25e3, ">= 1.1"), (None, ">= 1.1")])
def test_more_is_asked_for_beside_tbe_where_cores_are_whole_ones(
    one: float | None, limit: str
) -> None:
    of_one = {TBE_ONE: {"samples_per_s": one}} if one else {}
    rounds = [{**of, **of_one} for of in _rounds()]
    found = {target["target"]: target for target in targets(rounds)}
    of_tbe = found["rate over FBGEMM TBE, one process"]
    assert (of_tbe["limit"], of_tbe["met"]) == (limit, True)
    assert found["dense layers' FLOP in a CPU second over their best product's"]["met"]
    assert found["CPU seconds a step but for dense layers"]["value"] == pytest.approx(0.05)
    assert found["CPU seconds a step but for dense layers"]["met"] is False


@pytest.mark.exhaustive
def test_a_short_run(tmp_path: Path) -> None:
    results = tmp_path / "ctr.json"
    argv = [sys.executable, "-m", "bench.ctr", "--rounds", "1", "--ours", "1+1", "--batches", "6"]
    argv += ["--peers", f"plain,tfra,{DENSE}", "--seconds", "0.5", "--json", str(results)]
    argv += ["--peers-dir", str(tmp_path / "nothing"), "--docs", str(tmp_path)]
    run = subprocess.run(argv, cwd=ROOT, text=True, capture_output=True, check=False, timeout=400)
    assert run.returncode == 0, run.stderr
    found = json.loads(results.read_text())
    (turns,) = found["rounds"]
    assert set(turns) == {"1+1", "plain", DENSE}
    assert turns["1+1"]["samples_per_s"] > 0
    for name in turns:
        assert turns[name]["cpu_s"] > 0
    assert turns["1+1"]["server_cpu_s"] > 0
    assert set(found["checks"]) == {"plain"}
    assert "--install-peers" in found["failed"]["tfra"]
    assert MAIN not in turns
    assert "PyTorch, one process" in (tmp_path / "train_benchmark.md").read_text()
    again = [*argv, "--resume", "--steps", "61"]
    run = subprocess.run(again, cwd=ROOT, text=True, capture_output=True, check=False, timeout=60)
    assert run.returncode == 1
    assert "it has other settings" in run.stderr
