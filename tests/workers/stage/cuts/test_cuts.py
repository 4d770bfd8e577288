"""A training that goes on from a cut, against one that never stopped and against plain PyTorch."""

import errno
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ps import LocalTable
from tests.workers.stage.in_process import TABLES, Tables
from tests.workers.stage.test_equality import KEYS, cases, wide
from workers.model.saved.cut import DenseFiles, check_tables, read_cut
from workers.stage.cuts.folder import to_keep
from workers.stage.running import evaluation


def pulled(client, table, keys):
    if isinstance(client, Tables):
        return client.tables[table].pull(keys, True)
    return client.pull_unique(table, keys, read_only=True)


def results(case, pipeline, workers):
    """Weights by name, rows by table, and losses."""
    state = {}
    for worker in chain(*workers):
        state |= {name: value.clone() for name, value in worker.module.state_dict().items()}
    keys = np.arange(KEYS, dtype=np.uint64)
    rows = {name: pulled(pipeline.client, TABLES + name, keys) for name in ("one", "two")}
    for worker in chain(*workers):
        assert worker.executor.progress.step == len(case.sizes)
        assert worker.executor.progress.samples == sum(case.sizes)
    return state, rows, workers[-1][0].executor.progress.losses


def with_cuts(case, folder, **how):
    """Train with as many cuts as there can be; the results and the places of the cuts."""
    case.job.train.checkpoint.every = "1 steps"
    case.job.train.checkpoint.keep = 1000
    pipeline = case.pipeline(folder=folder, **how)
    workers = pipeline.run()
    judge = workers[0][0].executor._cuts.judge
    found = results(case, pipeline, workers)
    cuts = workers[0][0].executor.progress.cuts
    assert not cuts.failed, cuts.failed
    assert cuts.cuts, "none was taken"
    assert judge is not None
    return found, [cut.place for cut in cuts.cuts]


def named(folder):
    return {path.name for path in folder.iterdir()}


def gone_on(case, place, **how):
    pipeline = case.pipeline(resume=place, attempt=2, **how)
    return results(case, pipeline, pipeline.run())


def assert_equal(found, expected):
    for one, other in zip(found[:2], expected[:2], strict=True):
        assert one.keys() == other.keys()
        for name, value in one.items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(other[name]), name)
    assert found[2] == expected[2]


def assert_close(found, expected, tolerance):
    state = expected.model.state_dict()
    assert found[0].keys() == state.keys()
    for name, value in found[0].items():
        torch.testing.assert_close(value, state[name], rtol=tolerance, atol=tolerance)
    for name, table in (("first", "one"), ("second", "two")):
        rows = torch.from_numpy(found[1][table])
        torch.testing.assert_close(
            rows, expected.tables[name].values(), rtol=tolerance, atol=tolerance
        )
    assert found[2] == pytest.approx(expected.losses, rel=1e-5)


def check(folder, case, other, which):
    """Go on from a cut of `case` by the same plan, and by that of `other`."""
    whole, places = with_cuts(case, folder)
    place = places[which % len(places)]
    if not case.job.train.staleness:
        assert_equal(gone_on(case, place), whole)
    # The job has the micro-batches, where a layer sees them whole.
    micro_batches = case.micro_batches if case.experts else other.micro_batches
    moved = replace(case, cuts=other.cuts, widths=other.widths, micro_batches=micro_batches)
    found = gone_on(moved, place)
    if not case.job.train.staleness:
        assert_close(found, case.reference(), 2e-5)


@settings(max_examples=5, suppress_health_check=list(HealthCheck))
@given(cases(), cases(), st.integers(0, 100))
def test_any_cut_goes_on_under_any_plan(tmp_path_factory, case, other, which):
    check(tmp_path_factory.mktemp("cuts"), case, other, which)


@pytest.mark.exhaustive
@settings(max_examples=200, suppress_health_check=list(HealthCheck))
@given(cases(), cases(), st.integers(0, 100))
def test_many_cuts_go_on_under_any_plan(tmp_path_factory, case, other, which):
    check(tmp_path_factory.mktemp("cuts"), case, other, which)


@pytest.mark.parametrize("part", ["write", "write_losses"])
def test_what_a_cut_that_failed_has_left_goes(tmp_path, monkeypatch, part):
    """No room is left once some are complete, for weights or for losses; no later one tidies up."""
    case = replace(wide(clip=0.3), sizes=(13,) * 40)
    case.job.train.checkpoint.every = "1 steps"
    case.job.train.checkpoint.keep = 1000
    pipeline = case.pipeline(folder=tmp_path)
    own = getattr(DenseFiles, part)

    def full(self, value):
        if len(list(tmp_path.glob("*/cut.json"))) >= 2:
            raise OSError(errno.ENOSPC, "it is full by now")
        return own(self, value)

    monkeypatch.setattr(DenseFiles, part, full)
    workers = pipeline.run()
    assert "it is full by now" in workers[0][0].executor.progress.cuts.failed
    kept = [read_cut(str(path.parent)) for path in tmp_path.glob("*/cut.json")]
    assert len(kept) >= 2
    assert named(tmp_path / "dense") == {name for cut in kept for name in cut.files()}
    assert named(tmp_path / "tables") == {name for cut in kept for name in cut.tables.folders}
    assert {n for n in named(tmp_path) if n.isdecimal()} == {str(cut.step) for cut in kept}


def test_cuts_change_nothing(tmp_path):
    case = replace(wide(clip=0.3), sizes=(13,) * 12)
    pipeline = case.pipeline()
    without = results(case, pipeline, pipeline.run())
    found, places = with_cuts(case, tmp_path)
    assert_equal(found, without)
    assert [read_cut(place).step for place in places] == sorted(
        {int(p.rpartition("/")[2]) for p in places}
    )


@pytest.mark.parametrize("staleness", [0, 2])
def test_a_cut_that_is_the_best_stays(tmp_path, monkeypatch, staleness):
    """Each cut is measured on the weights and rows that it has."""
    case = replace(wide(staleness, widths=(2, 1, 2)), sizes=(13,) * 10)
    case.job.train.checkpoint.best = "valid_auc"
    random = np.random.default_rng(3)
    keys = torch.from_numpy(random.integers(0, KEYS, (32, 2)))
    labels = torch.from_numpy(random.integers(0, 2, 32).astype(np.float32))

    def given(job, split, size, rank, workers, stopped):
        assert split == "valid"
        for number in range(rank, 8, workers):
            part = slice(number * 4, number * 4 + 4)
            yield number, {"sparse": keys[part], "label.label": labels[part]}

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    _, places = with_cuts(case, tmp_path)
    for cut in map(read_cut, places):
        model = case.model()
        weights = {}
        for layer in cut.layers:
            if "weights" in layer.files:
                weights |= DenseFiles(str(tmp_path)).read(layer.files["weights"])
        model.load_state_dict(weights)
        saved = LocalTable.load_checkpoint(check_tables(str(tmp_path), cut.tables))
        model.first.store, model.second.store = saved[TABLES + "one"], saved[TABLES + "two"]
        with torch.no_grad():
            scores = model.eval()(keys).flatten()
        pairs = [
            float(a > b) + 0.5 * float(a == b)
            for a in scores[labels == 1]
            for b in scores[labels == 0]
        ]
        assert cut.metrics["valid_auc"] == pytest.approx(sum(pairs) / len(pairs), abs=1e-6)
    monkeypatch.undo()
    cuts = [read_cut(place) for place in places]
    spec = type(case.job.train.checkpoint)(keep=1, best="valid_auc")
    best = max(cuts, key=lambda cut: (cut.metrics["valid_auc"], cut.step))
    assert [cut.step for cut in to_keep(cuts, spec)] == sorted({best.step, cuts[-1].step})
