"""The model of `transformers`: a short job in two stages, and back into `transformers`."""

import shutil
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

import heterps
from heterps import Client, Cluster
from heterps.job.file import load_job
from tests.jobs import RESOURCES, write_workload
from workers.model.code.entry import load_entry

pytestmark = pytest.mark.exhaustive

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/hugging_face"
BLOCKS = ("wte", "wpe", "drop", "h.0", "h.1", "h.2", "ln_f")
LAYERS = (*(f"model.transformer.{name}" for name in BLOCKS), "model.lm_head")
ROWS = 200


def plain(model, rows):
    """The mean over all tokens that follow one, by the model's own loss."""
    ids = torch.zeros(len(rows), 64, dtype=torch.int64)
    mask = torch.zeros_like(ids)
    for at, row in enumerate(rows):
        ids[at, : len(row)], mask[at, : len(row)] = torch.tensor(row), 1
    with torch.no_grad():
        labels = ids.masked_fill(mask == 0, -100)
        return model.eval()(input_ids=ids, attention_mask=mask, labels=labels).loss.item()


def test_it_learns_in_two_stages_and_transformers_opens_it(tmp_path):
    transformers = pytest.importorskip("transformers", reason="needs heterps[huggingface]")
    shutil.copytree(EXAMPLE, tmp_path / "example")
    load_entry("prepare.py:prepare", EXAMPLE, "data.prepare")(str(tmp_path / "data"))
    valid = tmp_path / "data/valid.parquet"
    pq.write_table(pq.read_table(valid).slice(0, ROWS), valid)
    rows = pq.read_table(valid)["ids"].to_pylist()
    first = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "data/model")
    before = plain(first, rows)
    (tmp_path / "example/resources.yaml").write_text(RESOURCES)
    seconds = {name: 1e-3 if at < 4 else 9.0 for at, name in enumerate(LAYERS)}
    others = {name: 9.0 if at < 4 else 1e-3 for at, name in enumerate(LAYERS)}
    workload = write_workload(
        tmp_path / "workload.yaml", LAYERS, {"cpu": seconds, "v100": others}, 64, 4e3
    )
    overrides = {
        "output": f"{tmp_path}/out",
        "data.path": f"{tmp_path}/data",
        "model.args.folder": f"{tmp_path}/data/model",
        "train.max_steps": 40,
        "train.optimizer.warmup_steps": 5,
        "schedule.method": "greedy",
        "schedule.workload": str(workload),
        "schedule.emulate": ["v100"],
    }
    job = load_job(tmp_path / "example/job.yaml", overrides)
    with (
        Cluster(tmp_path / "cluster", types={"cpu": 2}, emulate=["v100"]) as running,
        Client(running.address) as client,
    ):
        job_id = client.submit(job)
        status = client.wait(job_id, timeout=300)
        assert status.state == "succeeded", status.reason
        assert len(client.decision_message(job_id).stages) == 2
    trained = heterps.load(status.output)
    measured = status.metrics["valid_loss"]
    assert measured < before - 0.5
    trained.model.save_pretrained(tmp_path / "trained")
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "trained")
    state = again.state_dict()
    for name, value in trained.model.state_dict().items():
        assert torch.equal(state[name], value)
    assert plain(again, rows) == pytest.approx(measured, rel=1e-5)
    scores = trained.predict({"ids": rows}, logits=True)
    ids = torch.tensor([rows[0]])
    torch.testing.assert_close(scores[0, : len(rows[0])], again(input_ids=ids).logits[0].detach())
