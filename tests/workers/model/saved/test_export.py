"""A model's dense part as a program of its own, given the rows of an exported table."""

import importlib.util
import json
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import heterps
from heterps import cli
from protos.job_pb2 import ColumnSpec, JobSpec
from protos.naming import table_prefix
from ps import LocalTable
from ps.local.table import save_checkpoint
from tests.rounds import more
from workers.model.code.entry import job_model
from workers.model.objective.curve import LossCurve
from workers.model.saved.model import SavedModel

MODEL = """
import torch
from torch import nn
from heterps import MoE, SparseEmbedding

class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = SparseEmbedding("items", 3)

    def forward(self, sparse):
        return torch.cat([self.rows(sparse[:, 1]), self.rows(sparse[:, 0])], 1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.pair, self.wide = Pair(), SparseEmbedding("wide", 2)
        self.norm, self.drop, self.head = nn.BatchNorm1d(11), nn.Dropout(0.5), nn.Linear(11, 2)

    def forward(self, sparse, dense):
        wide = self.wide(sparse).flatten(1)
        x = self.drop(self.norm(torch.cat([self.pair(sparse), wide, dense], 1)))
        click, other = self.head(x).unbind(1)
        return {"click": click, "other": other}

class Experts(Model):
    def __init__(self):
        super().__init__()
        self.experts = MoE(11, experts=4, hidden=6, k=2)

    def forward(self, sparse, dense):
        wide = self.wide(sparse).flatten(1)
        x = self.experts(torch.cat([self.pair(sparse), wide, dense], 1))
        click, other = self.head(x).unbind(1)
        return {"click": click, "other": other}

class Prototypes(Experts):
    def __init__(self):
        super().__init__()
        self.experts = MoE(11, experts=4, hidden=6, k=2, gate="prototype")

class Limited(Experts):
    def __init__(self):
        super().__init__()
        self.experts = MoE(11, experts=4, hidden=6, k=2, capacity_factor=1.25)

class ExpertChoice(Experts):
    def __init__(self):
        super().__init__()
        self.experts = MoE(11, experts=4, hidden=6, k=2, gate="expert_choice")

class Fixed(Model):
    def forward(self, sparse, dense):
        return super().forward(sparse, dense)["click"].reshape(3)
"""


def saved(folder, entry):
    (folder / "model.py").write_text(MODEL)
    job = JobSpec(directory=str(folder))
    job.model.entry = f"model.py:{entry}"
    job.data.sparse.extend(["a", "b"])
    job.data.dense.append("x")
    job.data.label = "y"
    model = job_model(job)
    random = np.random.default_rng(0)
    tables = []
    for name, layer in (("items", model.pair.rows), ("wide", model.wide)):
        options = layer.spec.table_options()
        tables.append(LocalTable.create(table_prefix("job1") + name, **options))
    saved = SavedModel(str(folder / "out"))
    saved.write_stage(0, model.state_dict())
    save_checkpoint(saved.tables, tables)
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    loaded = heterps.load(folder / "out")
    data = {"a": [1, 2, 3, 1], "b": ["x", "y", "x", "z"], "x": random.normal(size=4)}
    keys = loaded.predict.inputs(data)["sparse"].unique().numpy().view(np.uint64)
    for table in tables:  # rows of all keys
        table.push(keys, random.normal(size=(len(keys), table.dim)).astype(np.float32))
    loaded.norm.running_mean += 0.5
    saved = SavedModel(str(folder / "out"))
    saved.write_stage(0, loaded.state_dict())
    save_checkpoint(saved.tables, tables)
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    return data


PICTURES = """
from torch import nn

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.seen, self.head = nn.Conv2d(3, 2, 3), nn.Linear(8, 1)

    def forward(self, picture):
        return self.head(self.seen(picture).flatten(1)).squeeze(1)
"""


def save_without_tables(folder, text, **column):
    """A model of one input, the only one of its columns."""
    (folder / "model.py").write_text(text)
    job = JobSpec(directory=str(folder))
    job.model.entry, job.data.label = "model.py:Model", "y"
    job.data.columns["picture"].CopyFrom(ColumnSpec(**column))
    saved = SavedModel(str(folder / "out"))
    saved.write_stage(0, job_model(job).state_dict())
    save_checkpoint(saved.tables, [])
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})


BY_VALUES = """
import heterps
from torch import nn

class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 1)

    def forward(self, picture, return_dict=None):
        return {"logits": self.head(picture if float(picture.sum()) > 0 else -picture)}

def Model():
    return heterps.HuggingFace(Inner())
"""


def test_what_cannot_be_exported_of_transformers_has_another_way(tmp_path, capsys):
    save_without_tables(tmp_path, BY_VALUES, type="floats", length=2)
    target = tmp_path / "model.pt2"
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(target)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "torch.export: " in told
    assert "save_pretrained(folder), which the exporters for transformers read" in told
    assert not target.exists()


def test_pictures_are_made_up_as_models_take_them(tmp_path):
    save_without_tables(tmp_path, PICTURES, type="image", shape=[3, 4, 4])
    target = tmp_path / "model.pt2"
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(target)]) == 0
    pictures = torch.rand(7, 3, 4, 4)
    expected = heterps.load(tmp_path / "out")(pictures)
    torch.testing.assert_close(torch.export.load(target).module()(pictures), expected)


PACKED = """
import torch
from torch import nn

class Packs(nn.Module):
    def forward(self, x):
        rows, lengths = x.unsqueeze(2), (x > 0).sum(1).clamp(min=1)
        pack = nn.utils.rnn.pack_padded_sequence
        return pack(rows, lengths, batch_first=True, enforce_sorted=False)

class Encodes(nn.Module):
    def __init__(self):
        super().__init__()
        self.pack, self.lstm = Packs(), nn.LSTM(1, 6, batch_first=True)

    def forward(self, x):
        return self.lstm(self.pack.forward(x))[1][0][-1]

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encodes(), nn.Linear(6, 1)

    def forward(self, picture):
        return self.head(self.encoder(picture)).squeeze(1)
"""


@pytest.mark.parametrize(
    ("call", "where"),
    [(".pack.forward(x)", "encoder.lstm"), (".pack(x)", "encoder.pack")],
)
def test_packed_sequences_are_refused_by_the_module_that_has_them(tmp_path, capsys, call, where):
    text = PACKED.replace(".pack.forward(x)", call)
    save_without_tables(tmp_path, text, type="floats", length=5)
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(tmp_path / "it.pt2")]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert f"{where!r} has to do with a packed sequence" in told
    assert not (tmp_path / "it.pt2").exists()


FOLLOWED = """
import heterps
import torch
from transformers import BertConfig, BertForSequenceClassification as Bert

def build():
    sizes = {"hidden_size": 8, "num_attention_heads": 2, "intermediate_size": 12, "vocab_size": 30}
    torch.manual_seed(0)
    return heterps.HuggingFace(Bert(BertConfig(num_hidden_layers=2, num_labels=3, **sizes)))
"""


def test_a_model_of_transformers_is_written_whole(tmp_path):
    pytest.importorskip("transformers", reason="needs heterps[huggingface]")
    (tmp_path / "model.py").write_text(FOLLOWED)
    job = JobSpec(directory=str(tmp_path))
    job.model.entry, job.data.label, job.train.loss = "model.py:build", "y", "cross_entropy"
    for name, kind in (("input_ids", "ints"), ("attention_mask", "mask")):
        column = job.data.columns[name]
        column.of, column.type, column.length = "ids", kind, 6
    saved = SavedModel(str(tmp_path / "out"))
    saved.write_stage(0, job_model(job).state_dict())
    save_checkpoint(saved.tables, [])
    saved.finish(job, 1, LossCurve([0.5]), {"job_id": "job1"})
    target = tmp_path / "model.pt2"
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(target)]) == 0
    assert not (tmp_path / "model.pt2.tables").exists()
    model = heterps.load(tmp_path / "out")
    data = pa.table({"ids": pa.array([[1, 2, 3], [4], [5, 6, 7, 8, 9, 3], [2, 2]] * 2)})
    told = json.loads((tmp_path / "model.pt2.json").read_text())
    batch = model.predict.inputs(data)
    given = torch.export.load(target).module()(*(batch[one["name"]] for one in told["inputs"]))
    torch.testing.assert_close(given, model.predict(data, logits=True))


def served(target, data, model):
    """The inputs of the program, of exported rows by key."""
    told = json.loads((target.parent / f"{target.name}.json").read_text())
    batch = model.predict.inputs(data)
    arguments = []
    for one in told["inputs"]:
        if "table" not in one:
            arguments.append(batch[one["name"]])
            continue
        rows = pq.read_table(target.parent / f"{target.name}.tables" / one["table"])
        values = np.array(rows["values"].to_pylist(), np.float32)
        place = {key: index for index, key in enumerate(rows["key"].to_pylist())}
        assert one["keys"].startswith("sparse")
        keys = {"sparse": batch["sparse"]}
        keys = eval(one["keys"], {"slice": slice, "None": None}, keys).numpy().view(np.uint64)
        found = values[[place[key] for key in keys.reshape(-1).tolist()]]
        arguments.append(torch.from_numpy(found.reshape(*keys.shape, one["dim"])))
    return told, arguments


def test_a_program_and_exported_rows_give_what_the_model_gives(tmp_path, capsys):
    data = saved(tmp_path, "Model")
    target = tmp_path / "served/model.pt2"
    target.parent.mkdir()
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(target)]) == 0
    assert "rows of tables/" in capsys.readouterr().out
    model = heterps.load(tmp_path / "out")
    told, arguments = served(target, data, model)
    assert told["outputs"] == ["click", "other"]
    assert [one["name"] for one in told["inputs"][-1:]] == ["dense"]
    given = torch.export.load(target).module()(*arguments)
    for name, expected in model.predict(data, logits=True).items():
        torch.testing.assert_close(given[name], expected)
    names = sorted(one.name for one in target.parent.iterdir())
    assert names == ["model.pt2", "model.pt2.json", "model.pt2.tables"]


@pytest.mark.parametrize("entry", ["Experts", *more("Prototypes")])
def test_a_mixture_of_experts_runs_where_we_are_not(entry, tmp_path):
    data = saved(tmp_path, entry)
    target = tmp_path / "model.pt2"
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(target)]) == 0
    model = heterps.load(tmp_path / "out")
    _, arguments = served(target, data, model)
    torch.save((arguments, dict(model.predict(data, logits=True))), tmp_path / "expected")
    program = (
        "import sys, torch\n"
        "arguments, expected = torch.load('expected', weights_only=True)\n"
        "given = torch.export.load('model.pt2').module()(*arguments)\n"
        "for name, one in expected.items():\n"
        "    torch.testing.assert_close(given[name], one)\n"
        "assert not {'heterps', 'workers'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, check=True)


@pytest.mark.parametrize("entry", ["Limited", "ExpertChoice"])
def test_experts_that_take_a_share_of_the_batch_are_refused_by_name(entry, tmp_path, capsys):
    saved(tmp_path, entry)
    out = str(tmp_path / "out")
    assert cli.main(["export", out, "--torch", str(tmp_path / "it.pt2")]) == 2
    assert "'experts' is a MoE whose experts take no more than a share" in capsys.readouterr().err
    assert not (tmp_path / "it.pt2").exists()


def test_an_export_that_fails_leaves_no_program_beside_rows_of_another_model(tmp_path, capsys):
    saved(tmp_path, "Model")
    target, told = tmp_path / "model.pt2", tmp_path / "model.pt2.json"
    arguments = ["export", str(tmp_path / "out"), "--torch", str(target)]
    assert cli.main(arguments) == 0
    told.unlink()
    told.mkdir()  # cannot be written
    assert cli.main(arguments) != 0
    assert not target.exists()


def test_a_folder_that_is_not_there_is_told_in_words(tmp_path, capsys):
    saved(tmp_path, "Model")
    target = tmp_path / "served/model.pt2"
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(target)]) == 2
    assert f"{target}: cannot be written (No such file or directory)" in capsys.readouterr().err


def test_a_sample_is_read_no_further_than_it_is_needed(tmp_path, capsys):
    saved(tmp_path, "Model")
    sample = tmp_path / "sample"
    sample.mkdir()
    (sample / "b.csv").write_text("a,b,x\n1,y,high\n")
    arguments = ["export", str(tmp_path / "out"), "--torch", str(tmp_path / "model.pt2")]
    for rows, code in ((3, 2), (5, 0)):
        (sample / "a.csv").write_text("a,b,x\n" + "1,y,0.5\n" * rows)
        assert cli.main([*arguments, "--sample", str(sample)]) == code
    assert "b.csv, row 1: data.dense: x: got 'high'" in capsys.readouterr().err


def test_a_program_of_one_batch_size_alone_is_refused(tmp_path, capsys):
    saved(tmp_path, "Fixed")
    target = tmp_path / "model.pt2"
    assert cli.main(["export", str(tmp_path / "out"), "--torch", str(target)]) == 2
    assert not target.exists()
    assert "takes no batch of 5 rows" in capsys.readouterr().err


needs_onnx = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("onnx", "onnxscript", "onnxruntime")),
    reason="ONNX is not installed",
)


@needs_onnx
@pytest.mark.parametrize("entry", ["Model", "Experts", "Prototypes"])
def test_onnx_gives_what_the_model_gives(tmp_path, entry):
    import onnxruntime

    data = saved(tmp_path, entry)
    target = tmp_path / "model.onnx"
    assert cli.main(["export", str(tmp_path / "out"), "--onnx", str(target)]) == 0
    model = heterps.load(tmp_path / "out")
    told, arguments = served(target, data, model)
    session = onnxruntime.InferenceSession(target)
    feeds = {one["name"]: a.numpy() for one, a in zip(told["inputs"], arguments, strict=True)}
    given = session.run(None, feeds)
    for found, expected in zip(given, model.predict(data, logits=True).values(), strict=True):
        np.testing.assert_allclose(found, expected.numpy(), atol=1e-5)


@needs_onnx
def test_weights_of_large_models_lie_beside_the_program_that_names_them(tmp_path, monkeypatch):
    import onnxruntime

    large = "torch.onnx._internal.exporter._onnx_program._LARGE_MODEL_THRESHOLD"
    monkeypatch.setattr(large, 0)  # bytes
    data = saved(tmp_path, "Experts")
    target = tmp_path / "served/model.onnx"
    target.parent.mkdir()
    assert cli.main(["export", str(tmp_path / "out"), "--onnx", str(target)]) == 0
    names = sorted(one.name for one in target.parent.iterdir())
    assert names == ["model.onnx", "model.onnx.data", "model.onnx.json", "model.onnx.tables"]
    model = heterps.load(tmp_path / "out")
    told, arguments = served(target, data, model)
    session = onnxruntime.InferenceSession(target)
    feeds = {one["name"]: a.numpy() for one, a in zip(told["inputs"], arguments, strict=True)}
    expected = model.predict(data, logits=True)["click"]
    np.testing.assert_allclose(session.run(None, feeds)[0], expected.numpy(), atol=1e-5)


def test_onnx_that_is_not_installed_is_told(tmp_path, capsys, monkeypatch):
    saved(tmp_path, "Model")
    monkeypatch.setattr("workers.model.saved.export.find_spec", lambda name: None)
    target = tmp_path / "model.onnx"
    assert cli.main(["export", str(tmp_path / "out"), "--onnx", str(target)]) == 2
    assert "pip install heterps[onnx]" in capsys.readouterr().err
