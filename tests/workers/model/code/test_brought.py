"""The code that jobs bring, on a node: fetched once, refused when wrong, run in its own folder."""

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from chassis.channels import connect
from chassis.servers import Server
from chassis.transfer import Content, send
from protos.artifacts_pb2_grpc import ArtifactsStub, add_ArtifactsServicer_to_server
from protos.job_pb2 import JobSpec
from scheduler.service.access import Access
from scheduler.service.artifacts import Artifacts
from scheduler.service.artifacts_service import ArtifactsService
from workers.model.code import brought as module
from workers.model.code.brought import CodeCache, CodeError

ROOT = Path(__file__).resolve().parents[4]
Keep = Callable[..., str]


def packed(**files: str) -> bytes:
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(name.replace("__", "/") + ".py")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text.encode()))
    return made.getvalue()


@pytest.fixture
def scheduler(tmp_path: Path) -> Iterator[Server]:
    kept = Artifacts(tmp_path / "kept", lambda job_id: False, code_limit_bytes=1 << 20)
    server = Server("scheduler")
    access = Access(server.callers, lambda job_id: None)
    service = ArtifactsService(kept, lambda job_id: False, access)
    server.add(add_ArtifactsServicer_to_server, service, "heterps.v1.Artifacts")
    server.start()
    yield server
    server.stop(0.1)


@pytest.fixture
def keep(scheduler: Server) -> Iterator[Keep]:
    with connect(scheduler.address) as channel:

        def send_it(data: bytes) -> str:
            content = Content.of(io.BytesIO(data))
            send(ArtifactsStub(channel), content, what="send")
            return content.digest

        yield send_it


def job(digest: str, code: str = "", directory: str = "/home/me/work/jobs") -> JobSpec:
    return JobSpec(name="job", directory=directory, code=code, code_digest=digest)


def test_each_job_gets_a_copy_of_its_own(scheduler, keep, tmp_path):
    cache = CodeCache(tmp_path / "cache", scheduler.address)
    digest = keep(packed(model="x = 1\n", jobs__other="y = 2\n"))
    with ThreadPoolExecutor(8) as pool:
        homes = [tmp_path / f"job-{n % 4}" / "code" for n in range(16)]
        found = list(pool.map(lambda home: cache.bring(job(digest), home), homes))
    assert {one.directory for one in found} == {str(home) for home in homes}
    for home in homes:
        assert (home / "model.py").read_text() == "x = 1\n"
    assert os.listdir(tmp_path / "cache") == [digest], "it was fetched once"
    above = cache.bring(job(digest, ".."), tmp_path / "above")
    assert above.directory == str(tmp_path / "above" / "jobs")
    assert job(digest).directory == "/home/me/work/jobs", "what was submitted stays as it is"
    plain = JobSpec(name="shared", directory="/shared/job")
    assert cache.bring(plain, tmp_path / "none") == plain
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (job("0" * 64), "not here.*submit the job again"),
        (job("../../etc"), "64 hexadecimal digits"),
        (job("{digest}", "../.."), "has no folder work/jobs"),
        (job("{digest}", "src"), "the job file's folder or one above it"),
        (job("{bomb}"), "refused: over 1048576 bytes"),
        (job("{link}"), "refused: .*symbolic link"),
        (job("{text}"), "refused: not a .tar.gz archive"),
    ],
)
def test_code_that_cannot_be_had_is_an_error(scheduler, keep, tmp_path, spec, said):
    linked = io.BytesIO()
    with tarfile.open(fileobj=linked, mode="w:gz") as archive:
        info = tarfile.TarInfo("etc")
        info.type, info.linkname = tarfile.SYMTYPE, "/etc"
        archive.addfile(info)
    digests = {
        "digest": keep(packed(model="x = 1\n")),
        "bomb": keep(packed(model=" " * (5 << 20))),
        "link": keep(linked.getvalue()),
        "text": keep(b"no archive"),
    }
    asked = JobSpec()
    asked.CopyFrom(spec)
    asked.code_digest = spec.code_digest.format(**digests)
    home = tmp_path / "job" / "code"
    with pytest.raises(CodeError, match=said):
        CodeCache(tmp_path / "cache", scheduler.address).bring(asked, home)
    if "folder" not in said:
        assert not home.exists()


def test_archives_used_longest_ago_go(scheduler, keep, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_KEPT", 2)
    cache = CodeCache(tmp_path / "cache", scheduler.address)
    digests = [keep(packed(model=f"x = {n}\n")) for n in range(3)]
    for number, digest in enumerate(digests):
        cache.bring(job(digest), tmp_path / f"job-{number}")
        os.utime(tmp_path / "cache" / digest, (number, number))
    assert set(os.listdir(tmp_path / "cache")) == set(digests[1:])
    assert (tmp_path / "job-0" / "model.py").exists(), "a copy in use does not need it"


_CHILD = """
import json, os, subprocess, sys
from protos.job_pb2 import JobSpec
from workers.model.code.brought import enter

enter(JobSpec.FromString(bytes.fromhex(sys.argv[1])))
import helper
grandchild = [sys.executable, "-m", "protos.generate", "--help"]
shown = subprocess.run(grandchild, capture_output=True, text=True)
print(json.dumps({
    "cwd": os.getcwd(), "helper": helper.NAME, "ca": os.environ.get("HETERPS_TLS_CA"),
    "grandchild": shown.stdout.split()[0] if shown.stdout else shown.stderr,
}))
"""


@pytest.mark.parametrize("brought", [True, False])
def test_a_process_of_the_job_is_at_home_in_its_folder(tmp_path, brought):
    folder = tmp_path / "code"
    folder.mkdir()
    (folder / "helper.py").write_text("NAME = 'mine'\n")
    (folder / "protos.py").write_text("raise SystemExit('not this one')\n")
    spec = job("0" * 64 if brought else "", directory=str(folder))
    done = subprocess.run(
        [sys.executable, "-c", _CHILD, spec.SerializeToString().hex()],
        env={**os.environ, "PYTHONPATH": str(ROOT), "HETERPS_TLS_CA": "certs/ca.pem"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    told = json.loads(done.stdout)
    assert told["helper"] == "mine"
    assert told["grandchild"] == "usage:", "a module of the job does not hide one of ours"
    assert told["cwd"] == str(folder if brought else tmp_path)
    expected = str(tmp_path / "certs/ca.pem") if brought else "certs/ca.pem"
    assert told["ca"] == expected, "files named from where it was started are still found"


IN_A_FORK = """
import json, sys
from protos.job_pb2 import JobSpec
from workers.model.code.brought import enter
from workers import forked

assert {"sympy", "fractions"} <= set(sys.modules), "here early"
enter(JobSpec(directory=sys.argv[1]))
import fractions, statistics, sympy.core
print(json.dumps([statistics.__file__, sympy.core.__file__, fractions.__file__]))
"""


def test_what_workers_share_hides_no_module_of_the_job(tmp_path):
    (tmp_path / "statistics.py").touch()
    (tmp_path / "sympy").mkdir()
    for name in ("__init__", "core"):
        (tmp_path / "sympy" / f"{name}.py").touch()
    done = subprocess.run(
        [sys.executable, "-P", "-c", IN_A_FORK, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *theirs, fractions = json.loads(done.stdout)
    assert theirs == [str(tmp_path / "statistics.py"), str(tmp_path / "sympy" / "core.py")]
    assert not fractions.startswith(str(tmp_path))
