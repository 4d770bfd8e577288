"""What a loaded model predicts, against training's own evaluation of the same files."""

import math

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch

import heterps
from heterps import cli
from protos.job_pb2 import HeadSpec, JobSpec
from protos.naming import table_prefix
from ps import LocalTable
from ps.local.table import save_checkpoint
from workers.data.batches import in_order
from workers.data.errors import DataError
from workers.data.reader import Dataset
from workers.data.tensors import tensors_of
from workers.model.code.entry import job_model
from workers.model.objective.curve import LossCurve
from workers.model.saved.model import SavedModel

MODEL = """
import torch
from torch import nn
from heterps import SparseEmbedding

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = SparseEmbedding("items", 4, seed=5)
        self.norm = nn.BatchNorm1d(10)
        self.drop = nn.Dropout(0.5)
        self.click, self.minutes, self.kind = nn.Linear(10, 1), nn.Linear(10, 1), nn.Linear(10, 3)
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, sparse, dense):
        x = self.drop(self.norm(torch.cat([self.rows(sparse).flatten(1), dense], 1)))
        several = {"click": self.click(x), "minutes": self.minutes(x).squeeze(1)}
        return several | {"kind": self.kind(x), "code": x[:, :2], "scale": self.scale.exp()}

class One(Model):
    def forward(self, sparse, dense):
        return super().forward(sparse, dense)["click"].squeeze(1)

class Shift(nn.Module):
    def forward(self, x):
        x += 1
        return x * 1.0

class Shifts(One):
    def __init__(self):
        super().__init__()
        self.shift = Shift()

    def forward(self, sparse, dense, kind):
        return super().forward(sparse, dense) + self.shift(kind)

class Language(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = SparseEmbedding("items", 4), nn.Linear(4, 7)

    def forward(self, tokens):
        return self.head(self.rows(tokens))
"""
PREFIX = table_prefix("job1")
ROWS = 4999  # two batches of evaluation and a short one


def frame(rows=ROWS):
    random = np.random.default_rng(2)
    x = random.normal(size=rows)
    x[::7] = math.nan
    return pd.DataFrame(
        {
            "id": [f"row {n}" for n in range(rows)],
            "user": random.integers(0, 60, rows),
            "city": random.choice(["Oslo", "Bergen", "7"], rows),
            "x": x,
            "y": random.normal(size=rows),
            "click": random.integers(0, 2, rows),
            "minutes": random.normal(size=rows),
            "kind": random.integers(0, 3, rows),
        }
    )


def job_in(folder, entry="Model"):
    (folder / "model.py").write_text(MODEL)
    job = JobSpec(directory=str(folder), name="small")
    job.model.entry = f"model.py:{entry}"
    job.train.seed = 3
    if entry == "Language":
        job.data.tokens, job.train.loss, job.train.batch_size = "text", "next_token", 4
        return job
    job.data.sparse.extend(["user", "user*city"])
    job.data.dense.extend(["x", "y"])
    if entry == "One":
        job.data.label = "click"
        return job
    job.data.labels.extend(["click", "minutes", "kind"])
    for name, loss in (("click", ""), ("minutes", "huber"), ("kind", "cross_entropy")):
        job.train.heads[name].CopyFrom(HeadSpec(loss=loss or "bce_with_logits"))
    return job


def save(folder, job, **options):
    """Write a model with rows for some keys; it, in evaluation."""
    model = job_model(job)
    spec = model.rows.spec.table_options()
    table = LocalTable.create(PREFIX + "items", **spec, **options)
    data = job.data.train and Dataset.of(job, "train").encoded()
    keys = np.unique(
        data["sparse" if "sparse" in data.arrays and data["sparse"].size else "tokens"]
    )
    keys = keys.astype(np.int64).view(np.uint64)[: max(1, len(keys) * 3 // 4)]
    random = np.random.default_rng(0)
    table.push(keys, random.normal(size=(len(keys), 4)).astype(np.float32))
    if hasattr(model, "norm"):
        with torch.no_grad():
            model.norm.running_mean += 0.5
            model.norm.running_var *= 2
    saved = SavedModel(str(folder))
    saved.write_stage(0, model.state_dict())
    save_checkpoint(saved.tables, [table])
    model.rows.store = table
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    return model.eval()


def evaluated(model, job, size):
    """What training's evaluation computes, batch by batch."""
    found = {}
    with torch.no_grad():
        for _, batch in in_order(Dataset.of(job, "train"), size, 0, 1):
            tensors = tensors_of(batch)
            names = ["tokens"] if job.data.tokens else ["sparse", "dense"]
            given = model(**{name: tensors[name] for name in names})
            for name, output in ({"": given} if torch.is_tensor(given) else given).items():
                found.setdefault(name, []).append(output)
    return {name: torch.cat(o) if o[0].ndim else o[0] for name, o in found.items()}


@pytest.fixture(scope="module")
def heads(tmp_path_factory):
    """A saved model with several outputs, data, and what evaluation gives of it."""
    folder = tmp_path_factory.mktemp("heads")
    job = job_in(folder)
    data = frame()
    (folder / "data").mkdir()
    data[:3001].to_csv(folder / "data/a.csv", index=False)  # batches go over its end
    data[3001:].to_parquet(folder / "data/b.parquet", index=False, row_group_size=700)
    job.data.path, job.data.train = "data", "*"
    model = save(folder / "out", job)
    return folder, data, evaluated(model, job, 2048), model


def command(run, *arguments):
    code = cli.main(["predict", *map(str, arguments)])
    out = run.readouterr()
    return code, out.out, out.err


def test_a_file_has_what_evaluation_computed(heads, capsys, tmp_path):
    folder, data, expected, model = heads
    rows = len(model.rows.store)
    target = tmp_path / "scores.parquet"
    arguments = [folder / "out", folder / "data", "-o", target]
    assert command(capsys, *arguments, "--keep", "id", "--logits")[0] == 0
    table = pq.read_table(target)
    assert table.column_names == ["id", "click", "minutes", "kind", "code"]
    assert table["id"].to_pylist() == data["id"].tolist()  # in order, once, the short batch too
    for name in table.column_names[1:]:
        found = np.array(table[name].to_pylist(), np.float32)
        assert np.array_equal(found, expected[name].reshape(found.shape).numpy()), name
    assert [one.name for one in tmp_path.iterdir()] == ["scores.parquet"]

    assert command(capsys, *arguments)[0] == 0
    table = pq.read_table(target)
    click = np.array(table["click"].to_pylist(), np.float32)
    assert np.array_equal(click, expected["click"][:, 0].sigmoid().numpy())
    kind = np.array(table["kind"].to_pylist(), np.float32)
    assert np.array_equal(kind, expected["kind"].softmax(1).numpy())
    assert np.array_equal(table["minutes"].to_numpy(), expected["minutes"].numpy())
    assert len(model.rows.store) == rows

    other = tmp_path / "scores.csv"
    assert command(capsys, *arguments[:2], "-o", other, "--keep", "id", "--batch", 300)[0] == 0
    read = pd.read_csv(other)
    assert read.columns.tolist() == [
        *("id", "click", "minutes", "kind_0", "kind_1", "kind_2", "code_0", "code_1")
    ]
    np.testing.assert_allclose(read["click"], click, atol=1e-6)
    np.testing.assert_allclose(read[["kind_0", "kind_1", "kind_2"]], kind, atol=1e-6)


def test_in_python_as_in_files_whatever_the_mode(heads):
    folder, data, expected, _ = heads
    model = heterps.load(folder / "out").train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    rows = len(model.rows.store)
    unlabelled = data.drop(columns=["click", "minutes", "kind", "id"])
    views = pa.Table.from_pandas(unlabelled)
    views = views.set_column(1, "city", views["city"].cast(pa.string_view()))  # as of Polars
    ways = [folder / "data", unlabelled, pa.Table.from_pandas(unlabelled), views]
    for given in (*ways, unlabelled.to_dict("list"), {n: v.values for n, v in unlabelled.items()}):
        found = model.predict(given, logits=True)
        assert found.keys() == expected.keys()
        for name, output in found.items():
            assert torch.equal(output, expected[name]), name
    assert model.training
    assert model.drop.training
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert len(model.rows.store) == rows
    order = np.random.default_rng(1).permutation(len(data))
    shuffled = model.predict(unlabelled.iloc[order])["minutes"]
    torch.testing.assert_close(shuffled, expected["minutes"][order])


def test_no_rows_give_the_same_columns(heads, capsys, tmp_path):
    folder, data, *_ = heads
    empty, target = tmp_path / "empty.csv", tmp_path / "none.parquet"
    data[:0].to_csv(empty, index=False)
    assert command(capsys, folder / "out", empty, "-o", target, "--keep", "id")[0] == 0
    table = pq.read_table(target)
    assert table.num_rows == 0
    assert table.column_names == ["id", "click", "minutes", "kind", "code"]
    found = heterps.load(folder / "out").predict(data[:0])
    assert found["kind"].shape == (0, 3)


def test_what_does_not_fit_is_told_before_anything_is_written(heads, capsys, tmp_path):
    folder, data, *_ = heads
    model, target = folder / "out", tmp_path / "scores.parquet"
    for changed, told in (
        (data.drop(columns="city"), "data.sparse: got 'city', expected a column of the file"),
        (data.assign(x="high"), "data.dense: x: got"),
    ):
        changed.to_parquet(tmp_path / "bad.parquet", index=False)
        code, _, err = command(capsys, model, tmp_path / "bad.parquet", "-o", target)
        assert (code, told in err) == (2, True), err
        with pytest.raises(DataError, match=told.split(":")[0]):
            heterps.load(model).predict(changed)
    good = tmp_path / "good.parquet"
    data.assign(tags=[[1, 2]] * len(data)).to_parquet(good, index=False)
    for more, told in (
        (("-o", "-", "--keep", "tags"), "--keep tags: got 'list<element: int64>', expected plain"),
        (("-o", target, "--keep", "idd"), "did you mean 'id'?"),
        (("-o", good), "another file than those that are read"),
        (("-o", tmp_path / "a.xlsx"), "expected a file ending in .parquet, .csv or .tsv"),
        (("-o", target, "--keep", "click"), "called otherwise than the model's outputs"),
    ):
        code, _, err = command(capsys, model, good, *more)
        assert (code, told in err) == (2, True), err
    text = tmp_path / "late.csv"
    data.astype({"y": str}).assign(y=[*map(str, data["y"][:-1]), "high"]).to_csv(text, index=False)
    code, _, err = command(capsys, model, text, "-o", target)
    assert (code, f"row {ROWS}: data.dense: y: got 'high'" in err) == (2, True), err
    assert sorted(one.name for one in tmp_path.iterdir()) == [
        *("bad.parquet", "good.parquet", "late.csv")
    ]


def test_one_output_on_standard_output(tmp_path, capsysbinary):
    job = job_in(tmp_path, "One")
    frame(50).to_csv(tmp_path / "data.csv", index=False)
    job.data.train = "data.csv"
    model = save(tmp_path / "out", job)
    expected = evaluated(model, job, 2048)[""].sigmoid()
    assert cli.main(["predict", str(tmp_path / "out"), str(tmp_path / "data.csv"), "-o", "-"]) == 0
    read = pa.csv.read_csv(pa.BufferReader(capsysbinary.readouterr().out))
    assert read.column_names == ["prediction"]
    np.testing.assert_allclose(read["prediction"].to_numpy(), expected.numpy(), atol=1e-6)
    assert torch.equal(heterps.load(tmp_path / "out").predict(frame(50)), expected)


def test_a_model_that_changes_its_inputs_changes_no_data(tmp_path):
    job, data = job_in(tmp_path, "One"), frame(50)
    data.to_parquet(tmp_path / "data.parquet", index=False)
    job.data.train = "data.parquet"
    expected = evaluated(save(tmp_path / "plain", job), job, 2048)[""] + torch.tensor(
        data["kind"] + 1
    )
    job.model.entry, job.data.columns["kind"].type = "model.py:Shifts", "int"
    save(tmp_path / "out", job)
    loaded, before = heterps.load(tmp_path / "out"), data.copy()
    for _ in range(2):
        torch.testing.assert_close(loaded.predict(data, logits=True), expected)
    pd.testing.assert_frame_equal(data, before)


def test_tokens_and_rows_on_disk(tmp_path):
    """The last token of each list is what is to be predicted, and is not given to the model."""
    job = job_in(tmp_path, "Language")
    text = np.random.default_rng(0).integers(0, 50_000, (1500, 6)).tolist()
    pq.write_table(pa.table({"text": text}), tmp_path / "text.parquet")
    job.data.train = "text.parquet"
    model = save(tmp_path / "out", job, memory_bytes=1 << 16)
    loaded = heterps.load(tmp_path / "out")
    assert loaded.rows.store.counters["rows"] == len(model.rows.store)
    found = loaded.predict(tmp_path / "text.parquet", logits=True)
    assert found.shape == (1500, 5, 7)
    assert torch.equal(found, evaluated(model, job, 4)[""])
