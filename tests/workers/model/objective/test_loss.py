"""A loss of the job's own is tried before it trains anything."""

import sys
import tempfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from chassis import scratch
from protos.job_pb2 import JobSpec
from workers.data.errors import DataError
from workers.model.chain.trace import TracedModel
from workers.model.checks.objective import check_loss
from workers.model.code.entry import ModelError
from workers.model.objective.loss import job_loss


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(2, 1)

    def forward(self, dense):
        x = self.out(dense)
        return {"y": x.squeeze(1), "scale": x.sum() * 0 + 2.0}


HEAD = "import torch\nimport heterps\n\ndef squares(outputs, batch):\n"
SQUARES = HEAD + "    return (outputs['y'] - batch['label']).square()\n\n"
COUNTS = "(lambda batch: (batch['label'] > 0.5).sum())"
LATE = "\n    late = batch['label'] > 0.5\n    return squares(outputs, batch)[late]"


@pytest.fixture
def made(tmp_path):
    def make(code, **data):
        rng = np.random.default_rng(0)
        columns = {name: rng.normal(size=40) for name in ("a", "b")}
        columns |= {"label": rng.uniform(size=40), "w": rng.uniform(size=40)}
        pq.write_table(pa.table(columns), tmp_path / "t.parquet")
        sys.modules.pop("losses", None)
        (tmp_path / "losses.py").write_text(SQUARES + code)
        job = JobSpec(directory=str(tmp_path))
        job.data.train, job.data.label, job.model.loss = "t.parquet", "label", "losses.py:total"
        job.data.dense.extend(["a", "b"])
        job.data.weight = data.get("weight", "")
        return TracedModel(Net()), job

    return make


WHOLE = "y = outputs['y']\n    return (y[:, None] - y).square().mean()"
RIGHT = [
    "def total(outputs, batch):\n    return squares(outputs, batch)",
    "def total(outputs, batch):\n    return squares(outputs, batch).mean()",
    f"@heterps.loss(over={COUNTS})\ndef total(outputs, batch):{LATE}.mean()",
    "@heterps.loss(over='weights')\ndef total(outputs, batch):\n    return squares(outputs, batch)",
    "def total(outputs, batch):\n    return torch.rand(()) * squares(outputs, batch).mean()",
    "calls = 0\ndef total(outputs, batch):\n    global calls\n    calls += 1\n"
    "    return squares(outputs, batch)",
    f"@heterps.loss(over='batch')\ndef total(outputs, batch):\n    {WHOLE}",
]
WRONG = [
    ("def total(outputs, batch):\n    return squares(outputs, batch).sum()", "added up"),
    (f"def total(outputs, batch):{LATE}.mean()", "heterps.loss"),
    ("def total(outputs, batch):\n    return squares(outputs, batch).mean().sqrt()", "added up"),
    (f"def total(outputs, batch):\n    {WHOLE}", "over='batch' where samples are held against"),
    ("@heterps.loss(over={'x': 'weights'})\n" + RIGHT[0], "names no term 'x'"),
    (
        "@heterps.loss(over='tokens')\n" + RIGHT[0],
        "expected samples, weights, batch, or",
    ),
    ("def total(outputs, batch):\n    return squares(outputs, batch)[:, None]", "expected a mean"),
]


@pytest.mark.parametrize("code", RIGHT)
def test_a_mean_over_what_is_declared_is_taken(made, code):
    traced, job = made(code, weight="w")
    job.train.micro_batches = 2
    check_loss(traced, job)


@pytest.mark.parametrize(("code", "expected"), WRONG)
def test_parts_that_would_not_add_up_are_refused(made, code, expected):
    with pytest.raises(ValueError, match=expected):
        check_loss(*made(code, weight="w"))


class Summed(Net):
    def forward(self, dense):
        x = self.out(dense)
        return {"y": x.squeeze(1), "scale": x.sum()}


def test_an_output_that_is_no_row_may_not_depend_on_the_samples_of_a_loss_of_whole_batches(made):
    _, job = made(RIGHT[-1], weight="w")
    with pytest.raises(ModelError, match=r"'scale' \[\] is another one .* train\.micro_batches: 1"):
        check_loss(TracedModel(Summed()), job)
    job.train.micro_batches = 1
    check_loss(TracedModel(Summed()), job)


def test_weights_need_a_column(made):
    with pytest.raises(ModelError, match=r"without data\.weight"):
        job_loss(made(RIGHT[3])[1])


SEEN = "seen = []\ndef total(outputs, batch):\n    seen.append(1)\n"
COUNTED = "calls = 0\ndef total(outputs, batch):\n    global calls\n    calls += 1\n"
NOTED = """
class Total:
    calls = 0
    def __call__(self, outputs, batch):
        self.calls += 1
"""
MEAN = "squares(outputs, batch).mean()"


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (f"{SEEN}    return min(1, len(seen) / 100) * {MEAN}", "when called again, or often: each"),
        (f"{COUNTED}    return {MEAN} * (1 if calls < 500 else 2)", "when called again, or often"),
        (
            f"{NOTED}        return {MEAN} * (1 if self.calls < 500 else 2)\ntotal = Total()",
            "often",
        ),
        (
            f"import numpy as np\ndef total(outputs, batch):\n    return np.random.rand() * {MEAN}",
            "draws random numbers from NumPy",
        ),
        (
            f"import random\ndef total(outputs, batch):\n    return random.random() * {MEAN}",
            "draws from Python's random",
        ),
        (RIGHT[4], "draws random numbers, and the number of micro-batches"),
    ],
)
def test_a_loss_that_differs_on_each_worker_is_refused(made, code, message):
    traced, job = made(code)
    job.train.batch_size = 256
    with pytest.raises(ModelError, match=f"losses.py:total.*{message}"):
        check_loss(traced, job)


CLASSES = """
import torch
from torch import nn
from torch.nn import functional as f

WEIGHTS = nn.Parameter(torch.ones(3))
SCALE = torch.ones(3)

def weighted(outputs, batch):
    return f.cross_entropy(outputs, batch["label"].long(), weight=torch.tensor([1.0, 5.0, 0.2]))

def ignoring(outputs, batch):
    return f.cross_entropy(outputs, batch["label"].long(), ignore_index=2)

def learning(outputs, batch):
    return f.cross_entropy(outputs * WEIGHTS.exp(), batch["label"].long())

def detached(outputs, batch):
    return f.cross_entropy(outputs.detach(), batch["label"].long())

def smooth(outputs, batch):
    return f.cross_entropy(outputs * SCALE, batch["label"].long(), label_smoothing=0.1)
"""


class Logits(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(1, 3)

    def forward(self, dense):
        return self.out(dense)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        ("weighted", "added up of parts"),
        ("ignoring", "added up of parts"),
        ("learning", r"tensor \[3\] that is to learn and is no output of the model"),
        ("detached", "nothing can be learned by it"),
        ("smooth", None),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_loss_is_tried_on_labels_from_all_over_the_split(
    tmp_path, monkeypatch, kept, loss, expected
):
    """The first samples, which the model is tried on, are all of one class."""
    if kept:
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
        monkeypatch.setenv(scratch.VARIABLE, str(scratch.folder_of("job", 1)))
    label = np.sort(np.random.default_rng(0).choice(3, 3000, p=[0.9, 0.08, 0.02]))
    x = np.random.default_rng(1).normal(size=3000)
    pq.write_table(pa.table({"x": x, "label": label}), tmp_path / "t.parquet")
    (tmp_path / "losses.py").write_text(CLASSES)
    job = JobSpec(directory=str(tmp_path))
    job.data.train, job.data.label, job.model.loss = "t.parquet", "label", f"losses.py:{loss}"
    job.data.dense.append("x")
    if not kept:
        label[100:110] = 1  # what is read of a split that nobody keeps: its beginning
        label[110:130] = 2
        pq.write_table(pa.table({"x": x, "label": label}), tmp_path / "t.parquet")
    if expected is None:
        check_loss(TracedModel(Logits()), job)
        return
    with pytest.raises(ModelError, match=f"losses.py:{loss}.*{expected}"):
        check_loss(TracedModel(Logits()), job)


@pytest.mark.parametrize("heads", [False, True])
@pytest.mark.parametrize("split", ["train", "test"])
def test_a_class_without_a_logit_is_found_wherever_it_is(tmp_path, monkeypatch, split, heads):
    class Classes(nn.Module):
        def __init__(self):
            super().__init__()
            self.out = nn.Linear(1, 3)

        def forward(self, dense):
            return {"y": self.out(dense)} if heads else self.out(dense)

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(scratch.VARIABLE, str(scratch.folder_of("job", 1)))
    job = JobSpec(directory=str(tmp_path))
    for name in ("train", "test"):
        label = np.arange(200) % 3
        label[150] = 3 if name == split else 2
        pq.write_table(pa.table({"x": np.ones(200), "label": label}), tmp_path / f"{name}.parquet")
        setattr(job.data, name, f"{name}.parquet")
    job.data.label, job.train.loss = "label", "cross_entropy"
    job.data.dense.append("x")
    if heads:
        job.train.heads["y"].loss = "cross_entropy"
    with pytest.raises(DataError, match=rf"{split}.parquet, row 151: data.label: got 3, .*than 3"):
        check_loss(TracedModel(Classes()), job)
