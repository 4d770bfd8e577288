"""What makes two jobs different trainings, of which none goes on from the other's state."""

import pytest
from google.protobuf.text_format import Merge

from protos.job_pb2 import JobSpec
from protos.training import differences

BEFORE = """
model { entry: "./model.py:Net" }
data { path: "/data" train: "a.parquet" valid: "b.parquet" }
train { seed: 3 validate { every: "9 steps" metric: "valid_auc" patience: 2 } }
"""


@pytest.mark.parametrize(
    ("change", "keys"),
    [
        ('model { args { fields { key: "slots" value { number_value: 2 } } } }', ["model.args"]),
        ('data { train: "c.parquet" } train { seed: 4 }', ["data.train", "train.seed"]),
        ('train { validate { metric: "valid_logloss" } }', ["train.validate.metric"]),
        ("train { validate { patience: 3 } }", ["train.validate.patience"]),
        ('tables { key: "rows" value { learning_rate: 0.2 } }', ["tables.rows"]),
        ('tables { key: "rows" value { wire: "float16" memory_bytes: 9 } }', []),
        ('model { entry: "model.py:Net" } data { path: "/elsewhere" }', []),
        ('train { checkpoint { every: "5m" } offload { memory: "2GB" } warm_start: "job" }', []),
        ('schedule { method: "exact" } output: "there" retries: 2', []),
    ],
)
def test_a_difference_has_the_name_of_its_key(change, keys):
    before, job = Merge(BEFORE, JobSpec()), Merge(BEFORE, JobSpec())
    Merge(change, job)
    assert [name for name, _, _ in differences(job, before)] == keys
