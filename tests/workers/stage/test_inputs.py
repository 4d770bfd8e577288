"""Inputs by name, from files to a trained model, against plain PyTorch."""

from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import nn

from protos.job_pb2 import ColumnSpec, JobSpec
from tests.workers.stage.in_process import Pipeline
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.check import check
from workers.data.keys import PAD
from workers.data.tensors import tensors_of
from workers.embedding.sparse import SparseEmbedding
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import ModelError
from workers.model.module.inputs import arguments_of, inputs_of

ROWS, LENGTH = 40, 3


class Net(nn.Module):
    """A history beside the item; layers have names that inputs have, too."""

    def __init__(self):
        super().__init__()
        options = {"optimizer": "sgd", "learning_rate": 0.5, "scale": 1.0}
        self.items = SparseEmbedding("items", 4, **options)
        self.price, self.top = nn.Linear(3, 4), nn.Linear(8, 1)

    def forward(self, batch):
        seen = self.items(batch["history"]) * (batch["history"] != PAD).unsqueeze(2)
        item = self.items(batch["item"]) + self.price(batch["scores"])
        x = torch.cat([seen.sum(1), item * batch["price"].unsqueeze(1)], 1)
        return self.top(x).squeeze(1) + batch["day"] * 0.01


class Arguments(Net):
    def forward(self, item, history, scores, price, day):
        return super().forward(
            {"item": item, "history": history, "scores": scores, "price": price, "day": day}
        )


LISTS = [[], [7], [1, 2], [3, 1, 2], [9, 8, 1, 2, 3], None]


@pytest.fixture
def job(tmp_path):
    rng = np.random.default_rng(0)
    columns = {
        "video": pa.array(rng.integers(0, 9, ROWS)),
        "clicked": pa.array([LISTS[i % 6] for i in range(ROWS)], pa.list_(pa.int64())),
        "points": pa.array([[0.5, 1.5, float(i)] for i in range(ROWS)]),
        "price": pa.array(rng.normal(size=ROWS)),
        "day": pa.array(np.arange(ROWS) % 7),
        "label": pa.array(rng.integers(0, 2, ROWS)),
    }
    pq.write_table(pa.table(columns), tmp_path / "a.parquet", row_group_size=9)
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.label = ".", "a.parquet", "label"
    for name, spec in {
        "item": ColumnSpec(of="video", type="key"),
        "history": ColumnSpec(of="clicked", type="keys", length=LENGTH, slot="video"),
        "scores": ColumnSpec(of="points", type="floats", length=3),
        "price": ColumnSpec(type="float"),
        "day": ColumnSpec(type="int"),
    }.items():
        job.data.columns[name].CopyFrom(spec)
    job.train.batch_size, job.train.seed = 10, 3
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.1
    return job


@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_lists_keep_their_last_values_and_share_keys(job, tmp_path, cache_bytes):
    options = {"cache_bytes": cache_bytes, "window_rows": 16, "block_rows": 4}
    dataset = Dataset(job.data, "train", tmp_path, **options)
    table = pq.read_table(tmp_path / "a.parquet").to_pylist()
    key = {}
    batches = GlobalBatches(dataset, 10, seed=3)
    read = [tensors_of(batches.read(step)) for step in range(batches.steps)]
    rows = {name: torch.cat([one[name] for one in read]) for name in read[0]}
    order = rows["scores"][:, 2].long().tolist()
    assert sorted(order) == list(range(ROWS))
    for at, row in enumerate(order):
        key.setdefault(table[row]["video"], int(rows["item"][at]))
        assert int(rows["item"][at]) == key[table[row]["video"]]
        assert rows["day"][at] == table[row]["day"]
        assert float(rows["price"][at]) == pytest.approx(table[row]["price"])
    assert len(set(key.values())) == len(key)
    for at, row in enumerate(order):
        last = (table[row]["clicked"] or [])[-LENGTH:]
        expected = [key.get(value, int(rows["history"][at][i])) for i, value in enumerate(last)]
        assert rows["history"][at].tolist() == expected + [PAD] * (LENGTH - len(last))


@pytest.mark.parametrize("kind", [Net, Arguments])
@pytest.mark.parametrize(("cuts", "widths"), [([3], [1]), ([3], [2]), ([1, 2, 3], [2, 1, 2])])
def test_a_model_of_named_inputs_trains_as_in_plain_pytorch(job, tmp_path, kind, cuts, widths):
    def build():
        torch.manual_seed(5)
        return kind()

    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    steps = [batches.read(step) for step in range(batches.steps)]
    layers = len(TracedModel(build(), inputs_of(job.data)).layers)
    cuts = [*cuts[:-1], layers - 1]
    pipeline = Pipeline(job, build, cuts, widths, steps, 4)
    workers = pipeline.run()
    model = build().train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for batch in map(tensors_of, steps):
        optimizer.zero_grad()
        names = ["batch"] if kind is Net else ["item", "history", "scores", "price", "day"]
        out = model(**arguments_of(dict.fromkeys(names), batch))
        loss = nn.functional.binary_cross_entropy_with_logits(out, batch["label.label"])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = model.state_dict()
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=2e-5, atol=2e-5)
    assert workers[-1][0].executor.progress.losses == pytest.approx(losses, rel=1e-5)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = Net()

    def forward(self, batch):
        return self.top(batch)


class Unknown(nn.Module):
    def __init__(self):
        super().__init__()
        self.top = nn.Linear(1, 1)

    def forward(self, batch):
        return self.top(batch["pirce"])


@pytest.mark.parametrize(
    ("model", "expected"), [(Whole, "does more with its batch"), (Unknown, "reads 'pirce'")]
)
def test_what_cannot_be_followed_is_named(job, model, expected):
    with pytest.raises(ModelError, match=expected):
        TracedModel(model(), inputs_of(job.data))


@pytest.mark.parametrize("spec", [{"length": 3}, {"shape": [3]}])
def test_an_infinite_number_in_a_list_is_named_with_its_row(job, tmp_path, spec):
    points = [[0.5, 1.5, float(i)] for i in range(ROWS)]
    points[21][1] = 1e39
    table = pq.read_table(tmp_path / "a.parquet")
    at = table.column_names.index("points")
    pq.write_table(table.set_column(at, "points", pa.array(points)), tmp_path / "a.parquet")
    job.data.columns["scores"].CopyFrom(ColumnSpec(of="points", type="floats", **spec))
    with pytest.raises(DataError, match=r"row 22: data\.columns\.scores\.of: points: got 1e.39"):
        Dataset(job.data, "train", tmp_path).encoded()


@pytest.mark.parametrize(
    ("name", "spec", "expected"),
    [
        ("x", ColumnSpec(of="prise", type="float"), "did you mean 'price'"),
        ("x", ColumnSpec(of="price", type="keys", length=2), "a Parquet column of lists"),
        ("x", ColumnSpec(of="price", type="int"), "a whole number"),
        ("x", ColumnSpec(of="label", type="float"), "it is data.label"),
        ("x", ColumnSpec(of="video*day", type="key", slot="video"), "a cross of 2 columns"),
    ],
)
def test_columns_that_do_not_fit_are_named(job, name, spec, expected):
    check(job)
    job.data.columns[name].CopyFrom(spec)
    with pytest.raises(DataError, match=expected.replace("*", r"\*")):
        check(job)
