"""Jobs that bring their code and leave their model with the scheduler: no disk is shared."""

import asyncio
import inspect
import io
import json
import os
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pandas as pd
import pytest
import torch

import heterps
from chassis.channels import connect
from chassis.transfer import Content, send
from heterps import AsyncClient, Client, Cluster
from heterps.errors import CodeError, FetchError, UnknownJobError, UnreachableError
from heterps.job.file import JobFileError, load_job
from protos.artifacts_pb2_grpc import ArtifactsStub
from protos.scheduler_pb2 import SubmitRequest
from protos.scheduler_pb2_grpc import SchedulerStub
from scheduler import Decision
from tests.jobs import CLICKS_LAYERS, RESOURCES, write_workload

MODEL = """
from pathlib import Path

from torch import nn

from layers import tower
from heterps import SparseEmbedding


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = SparseEmbedding("rows", 4, learning_rate=0.05)
        self.tower = tower()
        self.wide = nn.Linear(1, 1)

    def forward(self, sparse, dense):
        return (self.tower(self.embedding(sparse)) + self.wide(dense)).squeeze(-1)


def build():
    import words.late  # found although this is not the import of the file itself

    print("job.yaml is here:", Path("job.yaml").is_file())
    return Model()
"""
LAYERS = """
from torch import nn


def tower():
    return nn.Sequential(nn.Flatten(), nn.Linear(8, 1))
"""
JOB = """\
name: tiny
model: {entry: model.py:build}
data: {path: rows, train: train.csv, valid: train.csv, label: y, dense: [x], sparse: [a, b]}
train: {epochs: 1, batch_size: 256, optimizer: {name: adam, learning_rate: 0.01}}
servers: {shards: 2}
schedule:
  method: exact
  resources: resources.yaml
  workload: workload.yaml
  pin: {embedding: cpu, tower: v100, wide: v100}
"""


class Sync:
    """The synchronous client, called as the other one is."""

    def __init__(self, address: str) -> None:
        self.client = Client(address)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        def do(*arguments: Any, **named: Any) -> Any:
            result = getattr(self.client, verb)(*arguments, **named)
            return list(result) if inspect.isgenerator(result) else result

        return do


class Async:
    """The asynchronous client on a loop of its own, one verb at a time."""

    def __init__(self, address: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.client = self.loop.run_until_complete(self._make(address))

    async def _make(self, address: str) -> AsyncClient:
        return AsyncClient(address)

    def __getattr__(self, verb: str) -> Callable[..., Any]:
        async def do(*arguments: Any, **named: Any) -> Any:
            result = getattr(self.client, verb)(*arguments, **named)
            if inspect.isasyncgen(result):
                return [item async for item in result]
            return await result

        return lambda *arguments, **named: self.loop.run_until_complete(do(*arguments, **named))


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("c"), types={"cpu": 3}, emulate=["v100"]) as running:
        yield running


@pytest.fixture(params=[Sync, Async], ids=["sync", "async"])
def client(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Any]:
    made = request.param(cluster.address)
    yield made
    made.close()


def write_job(folder: Path, job: str = JOB) -> Path:
    """A job of several files, its data among them."""
    (folder / "words").mkdir(parents=True)
    (folder / "rows").mkdir()
    (folder / "job.yaml").write_text(job)
    (folder / "model.py").write_text(MODEL)
    (folder / "layers.py").write_text(LAYERS)
    (folder / "words" / "late.py").write_text("WORDS = 1\n")
    (folder / "resources.yaml").write_text(RESOURCES)
    seconds = {"cpu": 1e-3, "v100": 1e-3}
    write_workload(folder / "workload.yaml", CLICKS_LAYERS, seconds, samples=4000)
    random = np.random.default_rng(0)
    a, b, x = random.integers(0, 9, 4000), random.integers(0, 9, 4000), random.normal(size=4000)
    rows = zip(((a % 2) + x > 0.5).astype(int), a, b, x, strict=True)
    lines = ["y,a,b,x", *(f"{y},{a},{b},{x:.3f}" for y, a, b, x in rows)]
    (folder / "rows" / "train.csv").write_text("\n".join(lines) + "\n")
    return folder / "job.yaml"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the job is submitted from, which no node may read or write."""
    return tmp_path_factory.mktemp("user") / "work"


@pytest.fixture(scope="module")
def ended(cluster: Cluster, home: Path) -> str:
    """A job that ran while the folder that it was submitted from was gone."""
    job_id = cluster.client().submit(write_job(home))
    shutil.rmtree(home)
    status = cluster.client().wait(job_id, 240)
    assert status.state == "succeeded", status.reason
    assert not home.exists(), "nothing was written there"
    return job_id


def test_a_job_runs_where_its_folder_is_not(client, ended, home, tmp_path):
    write_job(home)
    try:
        assert client.submit(home / "job.yaml", ended) == ended, "the same again: nothing happens"
    finally:
        shutil.rmtree(home)
    assert client.watch(ended)[-1].state == "succeeded"
    text = "".join(piece.text for piece in client.logs(ended))
    assert "trained" in text
    assert "job.yaml is here: True" in text
    assert "job.yaml is here: False" not in text
    fetched = client.get(ended, tmp_path / "got")
    assert fetched.model, fetched.note
    assert {"model.json", "metrics.json", "decision.json", "loss.csv", "code/model.py"} <= set(
        fetched.files
    )
    metrics = json.loads((tmp_path / "got/metrics.json").read_text())
    assert metrics["metrics"]["valid_auc"] > 0.8
    decision = Decision.load(tmp_path / "got/decision.json")
    assert [stage.type for stage in decision.stages] == ["cpu", "v100"]
    model = load_elsewhere(tmp_path / "got")
    with torch.no_grad():
        low = model(torch.tensor([[2, 3]]), torch.tensor([[-3.0]]))
        high = model(torch.tensor([[2, 3]]), torch.tensor([[3.0]]))
    assert low < high, "it has learned that x counts"


def test_what_was_fetched_stays(client, ended, tmp_path):
    fetched = client.get(ended, tmp_path / "got")
    weights = tmp_path / "got/dense.safetensors"
    weights.write_bytes(b"spoilt")
    table = next((tmp_path / "got/tables").rglob("*.rows"))
    before = table.stat().st_mtime_ns
    again = client.get(ended, tmp_path / "got")
    assert again == fetched
    assert weights.read_bytes() != b"spoilt"
    assert table.stat().st_mtime_ns == before, "what is whole is not fetched again"


def test_both_clients_answer_alike(client, ended, cluster):
    plain = cluster.client()
    assert client.status(ended) == plain.status(ended)
    assert client.jobs() == plain.jobs()
    assert client.find(ended[:-2]) == ended
    assert client.decision(ended) == plain.decision(ended)
    assert [one.job_id for one in client.decisions(1)] == [plain.decisions(1)[0].job_id]
    assert client.replan(ended) == plain.replan(ended)
    assert {node.node_id for node in client.nodes()} == {n.node_id for n in plain.nodes()}
    assert client.cancel(ended).state == "succeeded", "it has ended: cancelling changes nothing"
    assert client.wait(ended, 5).state == "succeeded"


@pytest.mark.parametrize(
    ("verb", "arguments", "error", "said"),
    [
        ("status", ("nobody",), UnknownJobError, "heterps jobs"),
        ("cancel", ("nobody",), UnknownJobError, "heterps jobs"),
        ("watch", ("nobody",), UnknownJobError, "heterps jobs"),
        ("logs", ("nobody",), UnknownJobError, "heterps jobs"),
        ("get", ("nobody",), UnknownJobError, "heterps jobs"),
        ("find", ("nobody",), UnknownJobError, "heterps jobs"),
        ("submit", ("no-such.yaml",), JobFileError, "no-such.yaml"),
    ],
)
def test_both_clients_fail_alike(client, ended, verb, arguments, error, said):
    with pytest.raises(error, match=said):
        getattr(client, verb)(*arguments)


def test_a_folder_that_holds_something_else_is_left_alone(client, ended, tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(FetchError, match=r"thesis\.tex.*--to DIR"):
        client.get(ended, tmp_path)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("made", [Sync, Async])
def test_nobody_answers(made):
    nobody = made("127.0.0.1:1")
    with pytest.raises(UnreachableError, match="heterps up"):
        nobody.jobs()
    with pytest.raises(UnreachableError, match="heterps up"):
        nobody.find("job")
    nobody.close()


def test_code_that_is_too_large_names_the_biggest_files(client, tmp_path):
    job = write_job(tmp_path / "work")
    for name, mebibytes in (("weights.bin", 60), ("notes.bin", 9)):
        with (tmp_path / "work" / name).open("wb") as stream:
            stream.truncate(mebibytes << 20)
    with pytest.raises(CodeError, match=r"(?s)weights\.bin.*notes\.bin.*\.heterpsignore"):
        client.submit(job)
    (tmp_path / "work/.heterpsignore").write_text("model.py\n*.bin\n")
    with pytest.raises(CodeError, match=r"model\.entry: model\.py is not in the code"):
        client.submit(job)


def submit_forged(cluster: Cluster, folder: Path, data: bytes, digest: str = "") -> str:
    """Submit a job whose code somebody made by hand, past what the client checks."""
    spec = load_job(write_job(folder))
    spec.code_digest = digest
    with connect(cluster.address) as channel:
        if data:
            content = Content.of(io.BytesIO(data))
            send(ArtifactsStub(channel), content, what="send")
            spec.code_digest = content.digest
        request = SubmitRequest(job_id=f"forged-{spec.code_digest[:8]}", job=spec)
        return SchedulerStub(channel).Submit(request, timeout=10).job_id


def test_code_that_was_never_sent_is_no_job(cluster, tmp_path):
    with pytest.raises(grpc.RpcError, match="no such code is here"):
        submit_forged(cluster, tmp_path, b"", "0" * 64)


def test_a_bomb_ends_its_job_alone(cluster, tmp_path):
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo("model.py")
        info.size = 100 << 20
        archive.addfile(info, io.BytesIO(bytes(100 << 20)))
    assert len(packed.getvalue()) < 1 << 20
    job_id = submit_forged(cluster, tmp_path, packed.getvalue())
    ended = cluster.client().wait(job_id, 120)
    assert ended.state == "failed"
    assert "the job's code is refused: over 67108864 bytes unpacked" in ended.reason
    cluster.check()
    fetched = cluster.client().get(job_id, tmp_path / "got")
    assert (fetched.model, fetched.note) == (False, "the job failed: it left no model")


def test_get_on_the_command_line(cluster, ended, tmp_path, run, monkeypatch):
    monkeypatch.setenv("HETERPS_SCHEDULER", cluster.address)
    monkeypatch.chdir(tmp_path)
    code, out, _ = run("get", ended)
    assert code == 0
    assert f"heterps.load('{tmp_path / ended}')" in out
    code, out, _ = run("get", ended, "--json", "--to", "there")
    assert json.loads(out)["model"] is True
    assert (tmp_path / "there/model.json").is_file()

    rows = {"x": [0.5, None, -1.0], "a": [1, 2, 99], "b": ["3", "4", "5"]}  # and no label
    (tmp_path / "new.csv").write_text("x,a,b\n0.5,1,3\n,2,4\n-1.0,99,5\n")
    code, _, err = run("predict", ended, "new.csv", "-o", "scores.csv", "--keep", "a")
    assert code == 0, err
    found = pd.read_csv("scores.csv")
    expected = heterps.load(tmp_path / "there").predict(rows)
    np.testing.assert_allclose(found["prediction"], expected.numpy(), atol=1e-6)
    assert found["a"].tolist() == rows["a"]


def load_elsewhere(folder: Path) -> torch.nn.Module:
    """Open a model from another working directory, by a path of its own."""
    moved = folder.with_name("moved")
    shutil.copytree(folder, moved)
    return heterps.load(moved)
