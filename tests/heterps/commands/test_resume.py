"""Jobs that are killed and gone on with, to the bit what they would have been; real processes."""

import json
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import load_file

from heterps import Client, Cluster, cli
from heterps.client.records import State
from heterps.job.file import load_job
from ps import LocalTable
from tests.jobs import write_ratings
from tests.waiting import wait_until

pytestmark = pytest.mark.exhaustive
STEPS = 60
EVERY = "train.checkpoint.every=10 steps"


@pytest.fixture(scope="module")
def ratings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("job")
    draw = np.random.default_rng(0)
    user, item = draw.integers(0, 500, 4000), draw.integers(0, 50, 4000)
    return write_ratings(folder, zip(user, item, (user + item) % 2, strict=True), STEPS, 0.1)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):
    with Cluster(tmp_path_factory.mktemp("cluster"), types={"cpu": 2}) as running:
        yield running


@pytest.fixture(scope="module")
def client(cluster):
    with Client(cluster.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def unfailed(client, ratings, tmp_path_factory) -> Path:
    """The model of a run that nothing happened to."""
    job = client.wait(client.submit(load_job(ratings)), timeout=300)
    assert job.state is State.SUCCEEDED, job.reason
    return Path(client.get(job.job_id, tmp_path_factory.mktemp("got") / "model").folder)


def assert_same(folder: Path, other: Path) -> None:
    """Losses, weights and rows are the same to the bit."""
    assert (folder / "loss.csv").read_text() == (other / "loss.csv").read_text()
    one, two = (load_file(f / "dense.safetensors") for f in (folder, other))
    assert all(np.array_equal(one[name], two[name]) for name in one.keys() | two.keys())
    (mine,) = LocalTable.load_checkpoint(folder / "tables").values()
    (theirs,) = LocalTable.load_checkpoint(other / "tables").values()
    keys = np.sort(mine.keys())
    assert np.array_equal(keys, np.sort(theirs.keys()))
    assert np.array_equal(mine.pull(keys), theirs.pull(keys))


def has_cut(client: Client, job_id: str, step: int) -> bool:
    job = client.status(job_id)
    assert not job.state.is_final, job.reason
    return any(cut.step >= step for cut in job.cuts)


def worker_of(client: Client, job_id: str) -> int:
    return next(
        process.pid
        for node in client.nodes()
        for process in node.processes
        if process.job_id == job_id and process.role == "stage" and process.running
    )


def test_a_retry_goes_on_from_the_files_that_the_scheduler_keeps(
    client, ratings, unfailed, tmp_path
):
    job_id = client.submit(load_job(ratings, [EVERY, "retries=1", "servers.durability=none"]))
    wait_until(lambda: has_cut(client, job_id, 20), "it has a cut")
    os.kill(worker_of(client, job_id), signal.SIGKILL)
    job = client.wait(job_id, timeout=300)
    assert (job.state, job.attempt) == (State.SUCCEEDED, 2), job.reason
    assert job.from_step >= 20
    assert len(job.cuts) == 3
    fetched = client.get(job_id, tmp_path / "model")
    assert not [name for name in fetched.files if name.startswith(("cuts/", "from/"))]
    assert_same(Path(fetched.folder), unfailed)
    measured = client.decision(job_id).measured
    model = json.loads((Path(fetched.folder) / "model.json").read_text())
    assert measured.seconds == pytest.approx(model["train_seconds"])
    assert 0 < measured.throughput_s < measured.seconds


def test_the_best_model_is_the_same_whoever_keeps_it_and_cuts_predict(client, ratings, tmp_path):
    """The scheduler or a folder; a cut predicts what a job of as many steps does."""
    told = [EVERY, "train.checkpoint.keep=9", "data.valid=train.csv"]
    told += ["train.validate.every=10 steps", "train.validate.patience=2"]
    told += ["train.validate.metric=min:valid_auc"]  # of which the first is the best
    runs = told, [*told, f"output={tmp_path}/out"], ["train.max_steps=20", f"output={tmp_path}/20"]
    jobs = [client.submit(load_job(ratings, some)) for some in runs]
    kept, put, short = (client.wait(one, timeout=300) for one in jobs)
    assert all(job.state is State.SUCCEEDED for job in (kept, put, short))
    fetched = Path(client.get(kept.job_id, tmp_path / "model").folder)
    found, expected = (
        json.loads((folder / "model.json").read_text()) for folder in (fetched, Path(put.output))
    )
    for name in ("best_step", "steps", "validated", "metrics"):
        assert found[name] == expected[name]
    assert found["best_step"] < found["steps"] < STEPS, "one that shows something"
    assert_same(fetched, Path(put.output))
    tables = []
    for number, model in enumerate((f"{put.output}.cuts/20", short.output)):
        target = tmp_path / f"{number}.parquet"
        data = ratings.parent / "train.csv"
        assert cli.main(["predict", str(model), str(data), "-o", str(target)]) == 0
        tables.append(pq.read_table(target))
    assert tables[0].num_rows == 4000
    assert tables[0].equals(tables[1])


def test_another_job_goes_on_from_a_cancelled_one(client, ratings, unfailed, tmp_path):
    job_id = client.submit(load_job(ratings, [EVERY]))
    wait_until(lambda: has_cut(client, job_id, 20), "it has a cut")
    client.cancel(job_id)
    other = load_job(ratings, ["servers.shards=2"])  # another plan, as far as one machine has any
    job = client.wait(client.submit(other, resume=job_id), timeout=300)
    assert job.state is State.SUCCEEDED, job.reason
    assert job.from_step >= 20
    assert_same(Path(client.get(job.job_id, tmp_path / "model").folder), unfailed)


@pytest.mark.parametrize("how", ["resumed", "retried"])
def test_a_job_does_not_go_on_with_other_data(client, ratings, tmp_path, how):
    """As many rows in files of as many bytes: nothing else would tell."""
    shutil.copy(ratings.parent / "train.csv", tmp_path)
    told = [EVERY, f"data.path={tmp_path}", "retries=1", "servers.durability=none"]
    job_id = client.submit(load_job(ratings, told))
    wait_until(lambda: has_cut(client, job_id, 20), "it has a cut")
    if how == "resumed":
        client.cancel(job_id)
        client.wait(job_id, timeout=60)
    head, *rows = (tmp_path / "train.csv").read_text().splitlines(keepends=True)
    (tmp_path / "train.csv").write_text("".join([head, *reversed(rows)]))
    if how == "resumed":
        job_id = client.submit(None, resume=job_id)
    else:
        os.kill(worker_of(client, job_id), signal.SIGKILL)
    job = client.wait(job_id, timeout=300)
    assert (job.state, job.end_reason) == (State.FAILED, "invalid_job")
    assert "data.train: train.csv: other contents than step" in job.error


def test_what_is_measured_is_what_was_held_out_when_training_began(
    client, ratings, unfailed, tmp_path
):
    for name in ("train.csv", "test.csv"):
        shutil.copy(ratings.parent / "train.csv", tmp_path / name)
    job_id = client.submit(load_job(ratings, [f"data.path={tmp_path}", "data.test=test.csv"]))
    wait_until(lambda: client.status(job_id).step >= 5, "it trains")
    head, *rows = (tmp_path / "test.csv").read_text().splitlines(keepends=True)
    others = [f"{row.rstrip()[:-1]}{1 - int(row.rstrip()[-1])}\n" for row in rows]
    (tmp_path / "test.csv").write_text("".join([head, *others]))
    job = client.wait(job_id, timeout=300)
    assert job.state is State.SUCCEEDED, job.reason
    expected = json.loads((unfailed / "model.json").read_text())["metrics"]
    assert job.metrics == pytest.approx(expected)


def test_a_job_begins_with_the_weights_and_rows_of_another(client, ratings, unfailed, tmp_path):
    """Which the scheduler keeps; a step that changes nothing of the dense weights is trained."""
    (name,) = {json.loads((unfailed / "metrics.json").read_text())["job_id"]}
    still = ["train.max_steps=1", "train.optimizer.name=sgd", "train.optimizer.learning_rate=1e-30"]
    job = client.wait(client.submit(load_job(ratings, [*still, f"train.from={name}"])), timeout=300)
    assert (job.state, job.step) == (State.SUCCEEDED, 1), job.reason
    folder = Path(client.get(job.job_id, tmp_path / "model").folder)
    one, two = (load_file(f / "dense.safetensors") for f in (folder, unfailed))
    assert all(np.array_equal(one[name], two[name]) for name in one.keys() | two.keys())
    (mine,) = LocalTable.load_checkpoint(folder / "tables").values()
    (theirs,) = LocalTable.load_checkpoint(unfailed / "tables").values()
    keys = np.sort(theirs.keys())
    assert np.array_equal(keys, np.sort(mine.keys()))
    same = (mine.pull(keys) == theirs.pull(keys)).all(axis=1)
    assert 0 < (~same).sum() <= 2 * 128, "those of one batch alone have changed"


def test_a_train_that_was_killed_is_gone_on_with(interruptible, ratings, unfailed, tmp_path):
    output = tmp_path / "out"
    arguments = ["train", str(ratings), "--set", f"output={output}", "--set", EVERY]
    first = subprocess.Popen([*interruptible, *arguments], stdout=subprocess.DEVNULL)
    wait_until(lambda: list(output.glob("*.cuts/20/cut.json")) or first.poll() is not None)
    first.kill()
    first.wait()
    left = {path.name for path in output.glob("*.cuts")}
    again = [*interruptible, *arguments, "--resume"]
    second = subprocess.run(again, check=False, capture_output=True, text=True, timeout=300)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "goes on from step " in second.stdout
    (model,) = (path.parent for path in output.glob("*/model.json"))
    assert f"{model.name}.cuts" not in left, "a job of its own"
    assert_same(model, unfailed)
    third = subprocess.run(again, check=False, capture_output=True, text=True, timeout=300)
    assert third.returncode == 2
    assert "has ended, and its model is there" in third.stderr
    shutil.rmtree(output)
