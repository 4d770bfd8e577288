"""Profiles that a node keeps: what makes another one of them, and when one no longer counts."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from protos.decision_pb2 import Layer, Resources, ResourceType, Workload
from protos.job_pb2 import JobSpec
from protos.node_pb2 import ProfileRequest
from workers.node import kept_profiles
from workers.node.kept_profiles import KeptProfiles, folder_of, small_work

FOUND = Workload(name="one", reference_batch=7, layers=[Layer(name="first")])


@pytest.fixture
def asked(tmp_path: Path) -> ProfileRequest:
    """What a job asks whose code and data lie in a folder."""
    folder = tmp_path / "job"
    folder.mkdir()
    (folder / "model.py").write_text("def build(): ...\n")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "part.py").write_text("X = 1\n")
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.csv").write_text("a,label\n1,0\n")
    job = JobSpec(name="job", directory=str(folder), output="there")
    job.model.entry = "model.py:build"
    job.data.path = str(tmp_path / "data")
    job.data.train = "*.csv"
    job.data.label = "label"
    job.data.dense.append("a")
    job.train.batch_size = 16
    resources = Resources(types=[ResourceType(name="cpu", price_per_hour=1.0)])
    return ProfileRequest(job_id="a", job=job, resources=resources)


@pytest.fixture
def kept(tmp_path: Path) -> KeptProfiles:
    return KeptProfiles("cpu", "a processor", 2, tmp_path / "kept")


def _change_data_path(asked: ProfileRequest) -> None:
    Path(asked.job.data.path, "train.csv").write_text("a,label\n1,0\n2,1\n")


def _change_code(asked: ProfileRequest) -> None:
    Path(asked.job.directory, "model.py").write_text("def build(): return 1\n")


def _touch(asked: ProfileRequest) -> None:
    os.utime(Path(asked.job.data.path, "train.csv"), ns=(1, 1))


def _add_file(asked: ProfileRequest) -> None:
    Path(asked.job.data.path, "more.csv").write_text("a,label\n3,1\n")


def _change_code_unseen(asked: ProfileRequest) -> None:
    """As long as before, and as if it were as old."""
    path = Path(asked.job.directory, "model.py")
    before = path.stat()
    path.write_text(path.read_text().replace("...", "pas"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _change_rows_unseen(asked: ProfileRequest) -> None:
    path = Path(asked.job.data.path, "train.csv")
    before = path.stat()
    path.write_text(path.read_text().replace("1,0", "1,1"))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def _change_linked_code(asked: ProfileRequest) -> None:
    Path(asked.job.directory, "linked", "part.py").write_text("X = 2\n")


CHANGES: dict[str, Callable[[ProfileRequest], object]] = {
    "the model": _change_code,
    "the model, its size and time as before": _change_code_unseen,
    "code behind a link": _change_linked_code,
    "its arguments": lambda r: r.job.model.args.update({"width": 8}),
    "another model": lambda r: setattr(r.job.model, "entry", "model.py:other"),
    "rows": _change_data_path,
    "rows, size and time as before": _change_rows_unseen,
    "a file's time": _touch,
    "another file": _add_file,
    "columns": lambda r: r.job.data.dense.append("b"),
    "a column's type": lambda r: setattr(r.job.data.columns["a"], "type", "key"),
    "precision": lambda r: setattr(r.job.train, "precision", "bf16"),
    "the batch": lambda r: setattr(r.job.train, "batch_size", 32),
    "epochs": lambda r: setattr(r.job.train, "epochs", 3),
    "staleness": lambda r: setattr(r.job.train, "staleness", 1),
    "the optimizer": lambda r: setattr(r.job.train.optimizer, "name", "sgd"),
    "linear layers": lambda r: setattr(r.job.train, "linear", "torch"),
    "tables": lambda r: setattr(r.job.tables["t"], "optimizer", "sgd"),
    "types": lambda r: r.resources.types.add(name="gpu"),
    "threads of a unit": lambda r: setattr(r.resources.types[0], "threads", 2),
}


@pytest.mark.parametrize("what", CHANGES)
def test_another_profile_is_measured_where_it_may_be_another(
    what: str, asked: ProfileRequest, kept: KeptProfiles
) -> None:
    before = kept.key(asked)
    assert before
    assert kept.key(asked) == before
    CHANGES[what](asked)
    assert kept.key(asked) not in ("", before)


def test_what_is_no_matter_for_times(asked: ProfileRequest, kept: KeptProfiles) -> None:
    before = kept.key(asked)
    asked.job_id, asked.term, asked.attempt = "b", 9, 2
    asked.job.name, asked.job.output, asked.job.priority = "other", "elsewhere", 3
    asked.job.schedule.min_throughput = 5.0
    assert kept.key(asked) == before


@pytest.mark.parametrize("what", ["type", "processor", "units", "threads", "cores", "software"])
def test_another_machine_measures_for_itself(
    what: str, asked: ProfileRequest, kept: KeptProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = kept.key(asked)
    folder = kept._folder
    if what == "type":
        kept = KeptProfiles("cpu-spot", "a processor", 2, folder)
    elif what == "processor":
        kept = KeptProfiles("cpu", "another processor", 2, folder)
    elif what == "units":
        kept = KeptProfiles("cpu", "a processor", 1, folder)
    elif what == "threads":
        monkeypatch.setenv("MKL_ENABLE_INSTRUCTIONS", "AVX2")
    elif what == "cores":
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
        if len(kept_profiles._machine()) and os.cpu_count() == 3:
            pytest.skip("this machine has so many")
    else:
        monkeypatch.setattr(kept_profiles, "_installed", lambda: ["torch-9.dist-info"])
    assert kept.key(asked) not in ("", before)


def test_paths_that_the_model_is_given(
    asked: ProfileRequest, kept: KeptProfiles, tmp_path: Path
) -> None:
    weights = tmp_path / "weights"
    weights.mkdir()
    (weights / "config.json").write_text("{}")
    asked.job.model.args.update({"deep": [{"from": str(weights)}]})
    before = kept.key(asked)
    (weights / "config.json").write_text('{"layers": 3}')
    assert kept.key(asked) not in ("", before)


def test_code_that_is_sent_is_known_by_its_digest(
    asked: ProfileRequest, kept: KeptProfiles
) -> None:
    asked.job.code_digest = "0" * 64
    before = kept.key(asked)
    _change_code(asked)
    asked.job.directory += "/elsewhere"
    assert kept.key(asked) == before
    asked.job.code_digest = "1" * 64
    assert kept.key(asked) not in ("", before)


def test_data_of_code_that_is_sent(asked: ProfileRequest, kept: KeptProfiles) -> None:
    asked.job.code_digest = "0" * 64
    asked.job.data.path = f"file://{asked.job.data.path}"
    before = kept.key(asked)
    Path(asked.job.data.path.removeprefix("file://"), "train.csv").write_text("a,label\n1,1\n")
    assert kept.key(asked) not in ("", before)


def test_a_module_that_was_imported_has_changed(
    kept: KeptProfiles, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_profiles, "small_work", lambda: [1.0, 1.0, 1.0])
    module = tmp_path / "module.py"
    module.write_text("X = 1\n")
    kept.keep("k", "a", FOUND, [str(module)])
    assert kept.find("k", "a") is None, "a process to fork from may have imported what was before"
    later = KeptProfiles("cpu", "a processor", 2, kept._folder)
    later._begun += 60
    later.keep("k", "a", FOUND, [str(module)])
    assert later.find("k", "a") is not None
    before = module.stat()
    module.write_text("X = 2\n")
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert later.find("k", "a") is None
    module.unlink()
    assert later.find("k", "a") is None


def test_nothing_is_kept_of_what_may_change_unseen(
    asked: ProfileRequest, kept: KeptProfiles
) -> None:
    for change in (
        lambda job: setattr(job.data, "path", "s3://bucket/rows"),
        lambda job: setattr(job.data, "source", "data.py:make"),
        lambda job: setattr(job.data, "train", "none.csv"),
        lambda job: setattr(job, "directory", "/nowhere"),
    ):
        other = ProfileRequest()
        other.CopyFrom(asked)
        change(other.job)
        assert kept.key(other) == ""
    off = KeptProfiles("cpu", "a processor", 2, folder_of({kept_profiles.FOLDER: "off"}))
    assert off.key(asked) == ""
    off.keep("", "a", FOUND, [])
    assert off.find("", "a") is None


def test_what_was_kept_is_found_and_says_since_when(
    kept: KeptProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_profiles, "small_work", lambda: [1.0, 1.0, 1.0])
    assert kept.find("k", "a") is None
    kept.keep("k", "a", FOUND, [])
    found = kept.find("k", "b")
    assert found is not None
    assert found.kept_at > 0
    assert found.workload == FOUND
    assert kept.find("other", "b") is None
    monkeypatch.setattr(kept_profiles, "_OLD_S", 0.0)
    assert kept.find("k", "b") is None


@pytest.mark.parametrize("now", [[1.0, 1.0, 1.4], [0.7, 1.0, 1.0], [2.0, 2.0, 2.0]])
def test_a_machine_that_is_faster_or_slower_than_it_was(
    now: list[float], kept: KeptProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_profiles, "small_work", lambda: [1.0, 1.0, 1.0])
    kept.keep("k", "a", FOUND, [])
    monkeypatch.setattr(kept_profiles, "small_work", lambda: now)
    assert kept.find("k", "a") is None


def test_a_machine_that_is_slow_just_now_is_the_same(
    kept: KeptProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_profiles, "small_work", lambda: [1.0, 1.0, 1.0])
    kept.keep("k", "a", FOUND, [])
    seen = iter([[1.9, 1.5, 1.0], [1.2, 1.9, 1.9], [1.9, 1.9, 1.9], [1.9, 1.1, 1.9]])
    monkeypatch.setattr(kept_profiles, "small_work", lambda: next(seen))
    assert kept.find("k", "a") is not None  # each of its works was as fast once
    assert next(seen, None) is None


def test_a_damaged_file_is_no_profile(kept: KeptProfiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_profiles, "small_work", lambda: [1.0, 1.0, 1.0])
    kept.keep("k", "a", FOUND, [])
    path = kept._place("k")
    whole = path.read_bytes()
    for cut in (0, 10, whole.index(b"\n"), len(whole) - 1):
        path.write_bytes(whole[:cut])
        assert kept.find("k", "a") is None
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    assert kept.find("k", "a") is None
    path.write_bytes(whole)
    assert kept.find("k", "a") is not None


@pytest.mark.parametrize(
    ("came_to", "stays"),
    [
        ([0.8, 0.8, 0.9], True),
        ([0.8, 0.0], True),  # too short to tell
        ([0.8, 1.2], False),  # faster than before
        ([1.0, 0.7], False),
        ([0.4], False),  # no promise at all
        ([2.5], False),
    ],
)
def test_jobs_say_whether_a_promise_was_kept(
    came_to: list[float], stays: bool, kept: KeptProfiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_profiles, "small_work", lambda: [1.0, 1.0, 1.0])
    kept.keep("k", "0", FOUND, [])
    for number, share in enumerate(came_to):
        assert kept.find("k", str(number)) is not None
        kept.judge(str(number), share)
        kept.judge(str(number), 0.01)  # each is heard once
    kept.judge("unknown", 0.01)
    assert (kept.find("k", "x") is not None) == stays


def test_only_so_many_are_kept(kept: KeptProfiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_profiles, "_KEPT", 3)
    for number in range(6):
        kept.keep(str(number), "a", FOUND, [])
        os.utime(kept._place(str(number)), (number, number))
    assert kept._folder is not None
    assert len([*kept._folder.iterdir()]) == 3


def test_small_work_takes_time() -> None:
    assert all(0 < seconds < 1 for seconds in small_work())
