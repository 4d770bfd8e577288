"""A job to sweep over, as files."""

from tests.jobs import CLICKS_LAYERS, CPU, write_clicks, write_workload

_JOB = """\
name: clicks
model: {entry: model.py:build}
data: {train: train.csv, valid: valid.csv, label: y, dense: [x], sparse: [a, b]}
train:
  max_steps: 30
  epochs: 100
  batch_size: 256
  validate: {every: 10 steps, metric: valid_auc}
servers: {shards: 1}
schedule: {method: greedy, resources: resources.yaml, workload: workload.yaml}
"""


def write_job(folder, **replaced):
    write_clicks(folder, rows=1024)
    (folder / "resources.yaml").write_text(CPU)
    write_workload(folder / "workload.yaml", CLICKS_LAYERS, {"cpu": 1e-3})
    rows = (folder / "train.csv").read_text().splitlines()
    (folder / "valid.csv").write_text("\n".join([rows[0], *rows[-256:]]) + "\n")
    text = _JOB
    for old, new in replaced.items():
        assert old in text
        text = text.replace(old, new)
    (folder / "job.yaml").write_text(text)
    return folder / "job.yaml"
