"""The benchmark of training: its data, its job and its page."""

from pathlib import Path

import numpy as np

from bench.ctr.__main__ import page
from bench.ctr.ours import write_job
from bench.ctr.shape import BATCH, KEYS, SLOTS, Data


def test_slots_have_rows_of_their_own_and_popular_ones(tmp_path: Path) -> None:
    data = Data.drawn(1)
    each = KEYS // SLOTS
    assert data.rows.shape == (BATCH, SLOTS)
    assert (data.rows // each == np.arange(SLOTS)).all()
    _, counts = np.unique(data.rows[:, 0], return_counts=True)
    assert counts.max() > 20 * np.median(counts)
    data.save(tmp_path / "data.npz")
    again = Data.load(tmp_path / "data.npz")
    assert (again.rows == data.rows).all()
    assert (again.labels == data.labels).all()


def test_a_job_reads_what_the_others_have(tmp_path: Path) -> None:
    from workers.data import Dataset

    data = Data.drawn(1)
    job = write_job(tmp_path / "job", data, 2, 2, 1)
    assert (job.schedule.elastic.min, job.schedule.elastic.max, job.servers.shards) == (2, 2, 2)
    read = Dataset.of(job, "train")
    assert read.rows == BATCH


def test_the_page_has_medians_of_ratios_and_who_did_not_run(tmp_path: Path) -> None:
    rates = [(20.0, 10.0), (40.0, 10.0), (30.0, 30.0)]
    rounds = [
        {
            "1+1": {"samples_per_s": 1e3 * ours},
            "2+2": {"samples_per_s": 3e3 * ours},
            "plain": {"samples_per_s": 1e3 * plain, "cpu_s": 0.25},
        }
        for ours, plain in rates
    ]
    found = {
        "date": "2026-01-01",
        "machine": {"processor": "p", "cores": 2},
        "versions": {"torch": "2"},
        "settings": {"batch": BATCH, "staleness": 1},
        "rounds": rounds,
        "failed": {"fbgemm": "not installed"},
    }
    text = page(found, tmp_path).read_text()
    assert "| PyTorch, one process, two threads | 10.0 | 2.00 | 6.00 | 250 |" in text
    assert "| HeterPS, 1 worker + 1 shard | 30.0 | 1.00 | 3.00 | – |" in text
    assert "| FBGEMM TBE, one process, two threads | not run |" in text
