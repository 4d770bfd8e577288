"""Which cuts stay: the newest, the best, and what an attempt may still be told to begin with."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec
from workers.model.objective.curve import LossCurve
from workers.model.saved.cut import Cut, DenseFiles, LayerFiles, TablesSave
from workers.stage.cuts.folder import CutFolder, SupersededError


def folder(tmp_path: Path, attempt: int = 1, from_step: int = 0, generation: int = 0) -> CutFolder:
    job = JobSpec(name="job")
    job.train.checkpoint.keep = 2
    made = CutFolder(lambda: str(tmp_path), "job", job, (attempt, generation), from_step)
    made.open()
    return made


def cut(tmp_path: Path, step: int, attempt: int = 1) -> Cut:
    dense = DenseFiles(str(tmp_path))
    losses = dense.write_losses(LossCurve([float(one) for one in range(step)]))
    return Cut(
        job_id="job",
        attempt=attempt,
        step=step,
        samples=step,
        applied=step,
        staleness=0,
        micro_batches=1,
        scales=None,
        job=JobSpec(name="job"),
        layers=(LayerFiles("only", {}),),
        losses=losses,
        tables=TablesSave((), ""),
    )


def there(tmp_path: Path) -> list[int]:
    return sorted(int(path.parent.name) for path in tmp_path.glob("*/cut.json"))


def files(tmp_path: Path) -> int:
    return len(list((tmp_path / "dense").iterdir()))


def test_none_goes_that_the_scheduler_may_name(tmp_path: Path) -> None:
    made = folder(tmp_path)
    told: Sequence[int] | None = None
    for step in (10, 20, 30):  # a scheduler that has never answered may know of any
        made.add(cut(tmp_path, step), told)
    assert [one.step for one in made.cuts] == [20, 30], "what is told of"
    assert there(tmp_path) == [10, 20, 30]
    made.add(cut(tmp_path, 40), [20, 30])
    assert there(tmp_path) == [20, 30, 40]
    for step in (50, 60, 70):  # it is away: what it knew last stays
        made.add(cut(tmp_path, step), [20, 30])
    assert there(tmp_path) == [20, 30, 60, 70]
    assert files(tmp_path) == 4, "each with the files that it needs"
    made.add(cut(tmp_path, 80), [60, 70])
    assert (there(tmp_path), files(tmp_path)) == ([60, 70, 80], 3)
    assert [one.step for one in made.cuts] == [70, 80]


def test_an_attempt_that_begins_at_an_older_cut_writes_over_those_after_it(tmp_path: Path) -> None:
    first = folder(tmp_path)
    for step in (10, 20, 30):
        first.add(cut(tmp_path, step), [])
    second = folder(tmp_path, attempt=2, from_step=20)
    assert [one.step for one in second.cuts] == [20]
    second.add(cut(tmp_path, 30, 2), [20])
    assert [(one.step, one.attempt) for one in second.cuts] == [(20, 1), (30, 2)]
    assert there(tmp_path) == [20, 30]


def test_a_generation_that_was_given_up_completes_no_cut_beside_the_next(tmp_path: Path) -> None:
    first = folder(tmp_path)
    first.add(cut(tmp_path, 10), [])
    second = folder(tmp_path, from_step=10, generation=2)
    with pytest.raises(SupersededError):
        first.add(cut(tmp_path, 20), [10])
    with pytest.raises(SupersededError):
        folder(tmp_path, generation=1)
    assert (there(tmp_path), [one.step for one in second.cuts]) == ([10], [10])
    folder(tmp_path, attempt=2)


def test_what_a_cut_that_failed_has_left_goes_and_nothing_else(tmp_path: Path) -> None:
    made = folder(tmp_path)
    for step in (10, 20, 30):
        made.add(cut(tmp_path, step), None)
    cut(tmp_path, 40)  # its files are there, and it is not completed
    (tmp_path / "tables" / "40-1.0").mkdir(parents=True)
    (tmp_path / "40").mkdir()
    assert files(tmp_path) == 4
    CutFolder(lambda: str(tmp_path), "job", JobSpec(), (1, 0), 0).tidy()
    assert files(tmp_path) == 4, "who has not looked knows of none that stays"
    made.tidy()
    assert (there(tmp_path), files(tmp_path)) == ([10, 20, 30], 3)
    assert not (tmp_path / "40").exists()
    assert not list((tmp_path / "tables").iterdir())
    folder(tmp_path, generation=1, from_step=30)
    with pytest.raises(SupersededError):
        made.tidy()
