"""Loggers, each with its own library: a run has each figure of each step once."""

import json

import pytest

from protos.job_pb2 import JobSpec
from tests.workers.stage.in_process import Pipeline
from tests.workers.stage.test_objectives import batches, build, job_of
from workers.model.code.entry import ModelError
from workers.stage.running.loggers import MLflow, job_loggers

FIGURES = ["train/loss", "train/learning_rate", *(f"train/loss_{n}" for n in ("click", "kind"))]


def of_tensorboard(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "job"), size_guidance={"scalars": 0})
    events.Reload()
    return {
        tag: [(one.step, one.value) for one in events.Scalars(tag)]
        for tag in events.Tags()["scalars"]
    }


def wandb_records(data):
    """A file of W&B: after a header of 7 bytes a log as LevelDB's, in blocks of 32 KiB."""
    at, whole = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        if left < 7:
            at += left
            continue
        size, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield whole
            whole = b""


def of_wandb(folder):
    from wandb.proto.wandb_internal_pb2 import Record

    found = {}
    runs = sorted(folder.glob("wandb/offline-run-*-job/run-job.wandb"))
    assert len(runs) == 2, "of one id, which are synced as one run"
    for run in runs:
        for data in wandb_records(run.read_bytes()):
            history = Record.FromString(data).history
            items = {item.key or "/".join(item.nested_key): item for item in history.item}
            for key in (key for key in items if not key.startswith("_")):
                step = int(items["_step"].value_json)
                found.setdefault(key, []).append((step, json.loads(items[key].value_json)))
    return found


def of_mlflow(folder):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"file://{folder}/runs")
    number = client.get_experiment_by_name("heterps").experiment_id
    (run,) = client.search_runs([number])
    assert run.info.status == "FINISHED"
    return {
        name: [(one.step, one.value) for one in client.get_metric_history(run.info.run_id, name)]
        for name in run.data.metrics
    }


@pytest.mark.parametrize(
    ("name", "library", "read"),
    [
        ("tensorboard", "tensorboard", of_tensorboard),
        ("wandb", "wandb", of_wandb),
        ("mlflow", "mlflow", of_mlflow),
    ],
)
def test_a_run_that_is_gone_on_with_has_every_figure_once(
    tmp_path, monkeypatch, name, library, read
):
    pytest.importorskip(library, reason=f"the extra {name} is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    job = job_of()
    job.train.checkpoint.every, job.train.checkpoint.keep = "1 steps", 100
    arguments = {"directory": str(tmp_path)}
    if name == "mlflow":
        arguments["tracking_uri"] = f"file://{tmp_path}/runs"
    job.train.loggers[name].update(arguments)
    measured = {"valid_click_auc": 0.75}

    def between(worker):
        if worker.parts.callbacks is not None:
            worker.parts.callbacks.measured(measured)
            worker.parts.callbacks.end()

    cuts, steps = tmp_path / "cuts", batches((16,) * 5)
    workers = Pipeline(job, build, [3], [1], steps, 2, folder=cuts, between=between).run()
    losses = workers[0][0].executor.progress.losses
    cut = min(int(one.name) for one in cuts.iterdir() if one.name.isdecimal())
    again = {"folder": cuts, "resume": f"{cuts}/{cut}", "attempt": 2, "between": between}
    Pipeline(job, build, [1, 3], [1, 2], batches((16,) * 7), 2, **again).run()
    found = read(tmp_path)
    assert found.keys() == {*FIGURES, "train/loss_delay", "valid/click_auc"}
    for figure in FIGURES:
        assert [step for step, _ in found[figure]] == [1, 2, 3, 4, 5, 6, 7], figure
    assert [value for _, value in found["train/loss"]][:5] == pytest.approx(losses, rel=1e-4)
    assert found["valid/click_auc"] == [(5, 0.75), (7, 0.75)]


def test_what_cannot_be_logged_is_said_before_training(tmp_path, monkeypatch):
    job = JobSpec()
    job.train.loggers["tensorboard"].SetInParent()
    with pytest.raises(ModelError, match=r"tensorboard\.directory: logs: expected an absolute"):
        job_loggers(job, "")
    assert job_loggers(job, str(tmp_path))
    job.train.loggers["tensorboard"]["folder"] = "x"
    with pytest.raises(ModelError, match=r"train\.loggers\.tensorboard: TypeError: .*'folder'"):
        job_loggers(job, str(tmp_path))
    monkeypatch.setattr("workers.stage.running.loggers.import_module", missing)
    with pytest.raises(ModelError, match=r"mlflow is not installed .* pip install 'heterps\[mlfl"):
        MLflow(tmp_path)


def missing(name):
    raise ModuleNotFoundError(f"No module named {name!r}")
