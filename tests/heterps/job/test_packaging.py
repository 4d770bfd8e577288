"""Packing code: the same bytes for the same files, and nothing that should stay."""

import os
import tarfile
from pathlib import Path

import pytest

from heterps.errors import CodeError
from heterps.job.packaging import IGNORE, Code, pack
from workers.model.code.unpack import Limits, unpack
from workers.model.objective.curve import LossCurve

LIMIT = 1 << 20


def write(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"# {name}\n")


def members(code: Code) -> list[tarfile.TarInfo]:
    code.content.stream.seek(0)
    with tarfile.open(fileobj=code.content.stream, mode="r:gz") as archive:
        return archive.getmembers()


def test_the_same_files_give_the_same_digest(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    write(first, "model.py", "a/b.py", "job.yaml")
    write(second, "job.yaml", "a/b.py", "model.py")
    os.utime(second / "model.py", (1, 1))
    (second / "a/b.py").chmod(0o600)
    one, other = pack(first, LIMIT), pack(second, LIMIT)
    assert one.content.digest == other.content.digest
    assert one.files == ("a/b.py", "job.yaml", "model.py")
    for entry in members(one):
        assert (entry.mtime, entry.uid, entry.gid, entry.uname, entry.gname) == (0, 0, 0, "", "")
    (second / "a/b.py").write_text("# other\n")
    assert pack(second, LIMIT).content.digest != one.content.digest
    (first / "a/b.py").chmod(0o755)
    assert pack(first, LIMIT).content.digest != one.content.digest, "it may be run now"


def test_what_is_packed_unpacks(tmp_path):
    write(tmp_path / "in", "model.py", "deep/er/x.py", "ünïcödé.txt", "a" * 150 + ".py")
    code = pack(tmp_path / "in", LIMIT)
    archive = tmp_path / "code.tar.gz"
    code.content.stream.seek(0)
    archive.write_bytes(code.content.stream.read())
    unpack(archive, tmp_path / "out", Limits())
    for name in code.files:
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "in" / name).read_bytes()


def test_some_things_always_stay(tmp_path):
    write(tmp_path, "model.py", ".git/config", "__pycache__/m.pyc", "pkg/__pycache__/x.pyc")
    write(tmp_path, ".venv/lib/x.py", ".env", "certs/server-key.pem", "pkg/in.py", ".ssh/id_rsa")
    assert pack(tmp_path, LIMIT).files == ("model.py", "pkg/in.py")


SECRETS = {
    "id_rsa": "-----BEGIN OPENSSH PRIVATE KEY-----\nb3Bl\n",
    "deploy/id_ed25519": "x",
    ".pypirc": "[pypi]\npassword = x\n",
    "kubeconfig": "x",
    "cluster.kubeconfig": "x",
    ".kube/config": "x",
    ".docker/config.json": "{}",
    ".env.production": "KEY=x",
    ".git-credentials": "x",
    "certs/token": "x",
    "service-account-prod.json": "{}",
    # By what they hold, whatever they are called.
    "deploy/mine": "-----BEGIN RSA PRIVATE KEY-----\nMIIE\n",
    "notes.txt": "the key\n-----BEGIN EC PRIVATE KEY-----\nMHc\n",
    "gcp.json": '{"type": "service_account",\n "private_key": "-----BEGIN PRIVATE KEY-----\\nMII"}',
    "admin.conf": "apiVersion: v1\nclusters: []\nkind: Config\nusers:\n- name: a\n",
    "admin.json": '{\n "kind": "Config",\n "clusters": [],\n "users": []\n}\n',
    "secret.yaml": "data:\n  key: |\n    -----BEGIN PRIVATE KEY-----\n    MIIE\n",
    "many.conf": f"kind: Config\nclusters:\n{'- name: a' * 10_000}\nusers:\n- name: a\n",
    "login.reg": "PuTTY-User-Key-File-3: ssh-ed25519\n",
}
PLAIN = {
    "id_rsa.pub": "ssh-rsa AAAA",
    ".env.example": "KEY=",
    "known.pub": "-----BEGIN PUBLIC KEY-----\nMIIB\n",
    "ca.crt": "-----BEGIN CERTIFICATE-----\nMIIB\n",
    "crypto.py": 'KEY = """\n-----BEGIN PRIVATE KEY-----\n"""\n',
    "service.yaml": "apiVersion: v1\nkind: ConfigMap\nusers: 3\nclusters: 2\n",
    "tokenizer.json": "{}",
    "token/vocabulary.txt": "a",
}


def test_secrets_stay_by_name_and_by_content_and_are_told(tmp_path):
    for name, text in (SECRETS | PLAIN).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    code = pack(tmp_path, LIMIT)
    assert set(code.files) == set(PLAIN)
    told = {line.partition(":")[0] for line in code.left_out}
    folders = {".kube/config": ".kube/", ".docker/config.json": ".docker/"}
    assert told == {folders.get(name, name) for name in SECRETS}


def test_a_rule_takes_a_secret_along(tmp_path):
    for name in ("id_rsa", "admin.conf", ".pypirc"):
        (tmp_path / name).write_text(SECRETS[name])
    (tmp_path / IGNORE).write_text("!id_rsa\n!admin.conf\n.*\n")
    code = pack(tmp_path, LIMIT)
    assert code.files == ("admin.conf", "id_rsa")
    assert code.left_out == ()  # what the user leaves out needs no telling


def test_what_heterps_wrote_stays_however_it_is_called(tmp_path):
    """A job's code is the same before it ran, after it, and in its middle."""
    import torch

    from heterps.client.download import Download
    from heterps.client.records import Job
    from protos.job_pb2 import JobSpec
    from protos.scheduler_pb2 import SUCCEEDED, JobStatus
    from ps import LocalShards, ParameterClient
    from scheduler.service.artifacts import Artifacts
    from workers.model.saved.model import SavedModel

    write(tmp_path, "model.py", "output/notes.txt", "model.json", "data/manifest.json")
    before = pack(tmp_path, LIMIT)
    assert before.files == ("data/manifest.json", "model.json", "model.py", "output/notes.txt")

    model = SavedModel(str(tmp_path / "output/job-1"))
    model.write_stage(0, {"weight": torch.rand(1000)})
    assert pack(tmp_path, LIMIT).content.digest == before.content.digest, "one that is half there"
    model.finish(JobSpec(), 1, LossCurve(), {})
    Download(Job.of(JobStatus(job_id="job-1", state=SUCCEEDED)), tmp_path / "got").open()
    Artifacts(tmp_path / "kept", lambda job_id: True)
    with (
        LocalShards(1, directory=tmp_path / "shards") as shards,
        ParameterClient(shards.addresses) as client,
    ):
        client.create_table("t", dim=2)
        client.save(tmp_path / "save")
    assert (tmp_path / "save/manifest.json").is_file()
    after = pack(tmp_path, LIMIT)
    assert after.content.digest == before.content.digest
    (told,) = after.left_out
    for name in ("output/job-1/", "got/", "kept/", "save/"):
        assert name in told
    inside = pack(tmp_path / "output/job-1", LIMIT)
    assert "model.json" in inside.files, "a folder that is named is taken as it is"


def test_a_model_of_before_the_mark_stays_too(tmp_path):
    write(tmp_path, "model.py")
    (tmp_path / "old").mkdir()
    (tmp_path / "old/model.json").write_text('{\n  "format": "heterps-model-1",\n')
    assert pack(tmp_path, LIMIT).files == ("model.py",)
    (tmp_path / IGNORE).write_text("!old/\n")
    assert pack(tmp_path, LIMIT).files == (IGNORE, "model.py", "old/model.json")


@pytest.mark.parametrize("name", [IGNORE, ".gitignore"])
def test_the_rules_are_those_of_git(tmp_path, name):
    write(tmp_path, "model.py", "data/a.csv", "data/keep.csv", "sub/data.csv", "runs/x/y", "a.log")
    (tmp_path / name).write_text("# what jobs do not need\n/data/*\n!keep.csv\nruns/\n*.log\n")
    found = [file for file in pack(tmp_path, LIMIT).files if not file.startswith(".")]
    assert found == ["data/keep.csv", "model.py", "sub/data.csv"]


def test_our_own_file_counts_before_that_of_git(tmp_path):
    write(tmp_path, "model.py", "data.csv")
    (tmp_path / ".gitignore").write_text("data.csv\n")
    (tmp_path / IGNORE).write_text(".*ignore\n")
    assert pack(tmp_path, LIMIT).files == ("data.csv", "model.py")


def test_links_that_lead_out_stay_and_are_named(tmp_path):
    write(tmp_path / "code", "model.py", "real.py")
    write(tmp_path, "secret.txt")
    (tmp_path / "code/same.py").symlink_to("real.py")
    (tmp_path / "code/out.txt").symlink_to(tmp_path / "secret.txt")
    (tmp_path / "code/round").symlink_to(tmp_path / "code")
    os.mkfifo(tmp_path / "code/pipe")
    code = pack(tmp_path / "code", LIMIT)
    assert code.files == ("model.py", "real.py", "same.py")
    assert all(entry.isreg() for entry in members(code)), "a link inside is a copy"
    assert len(code.left_out) == 3
    for said in ("out.txt: a link", "round: a link", "pipe: neither"):
        assert any(said in line for line in code.left_out)


def test_too_much_is_refused_with_the_biggest_first(tmp_path):
    write(tmp_path, "model.py")
    for name, size in (("small.bin", 300_000), ("large.bin", 700_000), ("mid.bin", 500_000)):
        (tmp_path / name).write_bytes(os.urandom(size))
    with pytest.raises(CodeError) as raised:
        pack(tmp_path, LIMIT)
    text = str(raised.value)
    assert text.index("large.bin") < text.index("mid.bin") < text.index("small.bin")
    assert IGNORE in text
    (tmp_path / IGNORE).write_text("*.bin\n")
    assert pack(tmp_path, LIMIT).files == (IGNORE, "model.py")


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    if os.getuid() == 0:
        pytest.skip("root may read every file")
    write(tmp_path, "model.py", "closed.py")
    (tmp_path / "closed.py").chmod(0)
    with pytest.raises(CodeError, match=r"closed\.py"):
        pack(tmp_path, LIMIT)
