"""Cuts of tables on real shards: what is in them, what they build on, and what comes too late."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from protos.job_pb2 import TableOptions
from ps import LocalShards, LocalTable, ParameterClient
from ps.errors import CheckpointError, ShardError
from tests.workers.stage.cuts.test_cuts import (
    assert_close,
    assert_equal,
    gone_on,
    results,
    with_cuts,
)
from tests.workers.stage.in_process import TABLES
from tests.workers.stage.test_equality import KEYS, wide
from workers.model.saved.cut import CutError, DenseFiles, UnfitCutError, check_tables, read_cut
from workers.stage.report.progress import Progress
from workers.stage.steps.series import holds_just, series_of

ALL = np.arange(KEYS, dtype=np.uint64)


@pytest.fixture(scope="module")
def shards():
    with LocalShards(2) as servers:
        yield servers


@pytest.fixture
def client(shards):
    with ParameterClient(shards.addresses) as made:
        yield made
        made.drop_tables(TABLES)


def test_tables_of_cuts_have_just_the_steps_before(tmp_path, client):
    """Held against a training that ends there; a chain of deltas is what its base stays for."""
    case = replace(wide(), sizes=(13,) * 60)
    found, places = with_cuts(case, tmp_path, client=client)
    assert_close(found, case.reference(), 1e-4)
    cuts = [read_cut(place) for place in places]
    assert any(len(cut.tables.folders) > 1 for cut in cuts), "deltas are taken"
    assert max(len(cut.tables.folders) for cut in cuts) <= 16
    for cut in (cuts[0], cuts[len(cuts) // 2], cuts[-1]):
        # The same rates: schedules look at the number of steps, and these have none.
        expected = replace(case, sizes=case.sizes[: cut.step]).reference()
        saved = LocalTable.load_checkpoint(
            tmp_path / "tables" / cut.tables.folders[-1], save=cut.tables.save
        )
        for name, table in (("first", "one"), ("second", "two")):
            rows = torch.from_numpy(saved[TABLES + table].pull(ALL, True))
            torch.testing.assert_close(rows, expected.tables[name].values(), rtol=1e-4, atol=1e-4)
    client.drop_tables(TABLES)
    with LocalShards(3) as others, ParameterClient(others.addresses) as elsewhere:
        assert_equal(gone_on(case, places[-1], client=elsewhere), found)


@pytest.mark.parametrize("after", [{"attempt": 2}, {"generation": 1}])
def test_a_late_commit_of_an_earlier_attempt_or_generation_changes_nothing(
    tmp_path, shards, client, after
):
    case = replace(wide(), sizes=(13,) * 20)
    whole, places = with_cuts(case, tmp_path, client=client)
    step = read_cut(places[0]).step
    late = {TABLES + "one": (ALL, np.ones((KEYS, 3), np.float32))}
    # A worker of those before that was stopped had staged its part, or had it in its hands. It
    # has a client of its own: one client's steps of a series wait for each other.
    series = series_of(TABLES, 1, 0, 0)

    def commits(at):
        with ParameterClient(shards.addresses) as former, pytest.raises(ShardError):
            former.commit_async(series, at, 1, parts=late).result()

    pipeline = case.pipeline(client=client, resume=places[0], **after)
    made = pipeline._made

    def and_then(place, graph):
        worker = made(place, graph)  # the tables are loaded
        if place.stage == place.rank == 0:
            for at in (step, step + 5, 10**6):
                commits(at)
        return worker

    pipeline._made = and_then
    assert_equal(results(case, pipeline, pipeline.run()), whole)
    commits(len(case.sizes))
    client.load(Path(places[0]).parent / "tables" / read_cut(places[0]).tables.folders[-1])
    commits(step)  # a load brings no series back that has ended


def test_tables_that_hold_more_than_a_cut_are_found_out(client):
    """Those of a generation that paused; whatever it has in its hands still is dropped."""
    table = TABLES + "paused"
    client.create_table(table, dim=3)
    part = {table: (ALL[:4], np.ones((4, 3), np.float32))}
    names = [series_of(TABLES, 7, 2, stage) for stage in range(3)]
    for step in range(5):
        client.commit_async(names[1], step, 1, parts=part).result()
    client.stage_async(names[1], 5, 0, part).result()  # of a step that it has not taken
    assert holds_just(client, TABLES, 7, 2, 3, 5)
    before = client.pull(table, ALL[:4], read_only=True)
    for late in (5, 6):
        with pytest.raises(ShardError):
            client.commit_async(names[1], late, 1, parts=part).result()
        with pytest.raises(ShardError):
            client.commit_async(names[2], late, 1, parts=part).result()
    np.testing.assert_array_equal(client.pull(table, ALL[:4], read_only=True), before)

    other = series_of(TABLES, 7, 3, 0)
    for step in range(5, 7):
        client.commit_async(other, step, 1, parts=part).result()
    assert not holds_just(client, TABLES, 7, 3, 3, 6), "step 6 was committed"
    with pytest.raises(ShardError):
        client.commit_async(other, 7, 1, parts=part).result()

    every = [series_of(TABLES, 7, 4, stage) for stage in range(32)]
    for name in every:
        client.commit_async(name, 7, 1, parts=part).result()
    assert not holds_just(client, TABLES, 7, 4, len(every), 6), "all of them have gone on"


class Heard(Progress):
    """Of a job whose scheduler hears of every cut at once."""

    cuts_told = property(lambda self: self.cuts)


def test_the_newest_cuts_stay_with_all_that_they_need(tmp_path, client):
    case = replace(wide(), sizes=(13,) * 40)
    case.job.train.checkpoint.keep = 2
    case.job.train.checkpoint.every = "1 steps"
    pipeline = case.pipeline(folder=tmp_path, client=client)
    made = pipeline._made

    def heard(place, graph):
        worker = made(place, graph)
        worker.executor.progress.__class__ = Heard
        return worker

    pipeline._made = heard
    workers = pipeline.run()
    found = results(case, pipeline, workers)
    kept = [cut.place for cut in workers[0][0].executor.progress.cuts.cuts]
    assert len(kept) == 2
    there = sorted(int(f.name) for f in tmp_path.iterdir() if f.name.isdecimal())
    # And the one before, which the scheduler named until it heard of the newest.
    assert len(there) == 3
    assert there[1:] == [read_cut(place).step for place in kept]
    cuts = [read_cut(str(tmp_path / str(step))) for step in there]
    dense = {f.name for f in (tmp_path / "dense").iterdir()}
    assert dense == {name for cut in cuts for name in cut.files()}
    tables = {f.name for f in (tmp_path / "tables").iterdir()}
    assert tables == {name for cut in cuts for name in cut.tables.folders}
    client.drop_tables(TABLES)
    assert_equal(gone_on(case, kept[0], client=client), found)


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """A job and a cut of it."""
    case = replace(wide(), sizes=(13,) * 6)
    return case, with_cuts(case, tmp_path_factory.mktemp("one"))[1][0]


def opened(place):
    """All that is read of a cut, by workers and shards."""
    cut, folder = read_cut(place), str(Path(place).parent)
    for layer in cut.layers:
        for file in layer.files.values():
            DenseFiles(folder).read(file)
    DenseFiles(folder).read_losses(cut.losses)
    LocalTable.load_checkpoint(check_tables(folder, cut.tables))


def test_a_damaged_cut_is_refused(one):
    _, place = one
    cut, folder = read_cut(place), Path(place).parent
    table = folder / "tables" / cut.tables.folders[-1]
    files = [Path(place) / "cut.json", *(folder / "dense" / name for name in sorted(cut.files()))]
    rows = list(table.glob("*/*.rows"))
    assert rows
    for path in [*files, *rows, table / "manifest.json"]:
        whole = path.read_bytes()
        flipped = bytearray(whole)
        flipped[len(whole) // 2] ^= 1
        for wrong in (bytes(flipped), whole[: len(whole) // 2], b"", None):
            path.unlink() if wrong is None else path.write_bytes(wrong)
            with pytest.raises((CutError, CheckpointError)):
                opened(place)
            path.write_bytes(whole)
    opened(place)


@pytest.mark.parametrize(
    "change",
    [
        lambda job: setattr(job.train.optimizer, "learning_rate", 0.5),
        lambda job: setattr(job.train, "seed", 5),
        lambda job: setattr(job.train.validate, "metric", "valid_logloss"),
        lambda job: job.tables["rows"].MergeFrom(TableOptions(learning_rate=0.5)),
        lambda job: setattr(job.data, "train", "other.csv"),
        lambda job: setattr(job.model, "entry", "other.py:Net"),
    ],
)
def test_a_cut_of_another_training_is_refused(one, change):
    case, place = one
    job = type(case.job)()
    job.CopyFrom(case.job)
    change(job)
    with pytest.raises(UnfitCutError, match=r"the cut .* was taken with"):
        gone_on(replace(case, job=job), place)


def test_a_cut_of_another_job_is_refused(one):
    case, place = one
    path = Path(place) / "cut.json"
    whole = path.read_text()
    tree = json.loads(whole)
    tree["job_id"] = "another"
    path.write_text(json.dumps(tree))
    with pytest.raises(CutError, match="checksum"):
        gone_on(case, place)
    path.write_text(whole)
