"""Callbacks of a job: what they are told, how they end a training, and what they may not do."""

import json
import time
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch

from protos.job_pb2 import JobSpec, ValidateSpec
from tests.workers.stage.in_process import TABLES, Pipeline
from tests.workers.stage.test_equality import KEYS, Case, wide
from tests.workers.stage.test_objectives import Heads, batches, job_of, plain
from tests.workers.stage.test_objectives import build as heads_model
from tests.workers.stage.test_objectives import heads as heads_loss
from workers.errors import CallbackError
from workers.model.code.entry import ModelError
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.kept import of_chunks, to_chunks
from workers.stage.cuts.state import StageState
from workers.stage.running import evaluation
from workers.stage.running.callbacks import job_callbacks
from workers.stage.running.executor import StageExecutor

CODE = """
import json

class Watch:
    def __init__(self, file, stop=0, at="on_step"):
        self.file, self.stop, self.at = file, stop, at

    def on_begin(self, state):
        self.told("on_begin", state)

    def on_step(self, state):
        self.told("on_step", state)

    def on_eval(self, state, metrics):
        self.told("on_eval", state, metrics)

    def on_end(self, state):
        self.told("on_end", state, state.error)

    def told(self, hook, state, more=None):
        line = [hook, state.step, state.loss, state.losses, state.samples, state.learning_rate]
        with open(self.file, "a") as file:
            file.write(json.dumps([*line, more, state.steps, state.job_id]) + "\\n")
        if hook == self.at and state.step == self.stop:
            state.stop()

class Fails:
    def __init__(self, hook):
        setattr(self, hook, self.fail)

    def fail(self, state, metrics=None):
        if state.step in (0, 3):
            raise ConnectionError("no such luck")

class Changes:
    def __init__(self, how):
        self.how, self.module = how, None

    def on_begin(self, state):
        if self.how == "kept":
            self.module = state.module

    def on_step(self, state):
        if state.step == 2:
            getattr(self, self.how)(self.module or state.module)

    def kept(self, module):
        next(module.parameters()).requires_grad_(False)

    def in_place(self, module):
        import torch
        with torch.no_grad():
            next(module.parameters()).mul_(1.0001)

    def data(self, module):
        next(module.parameters()).data.mul_(1.0001)

    def gradient(self, module):
        sum(p.sum() for p in module.parameters()).backward()

    def setting(self, module):
        from torch import nn
        linear = next(m for m in module.modules() if isinstance(m, nn.Linear))
        linear.in_features = linear.in_features + 1

    def looks(self, module):
        module.eval()
        self.norms = [p.norm().item() for p in module.parameters()]

class Wrong:
    def on_steps(self, state):
        pass

class Nothing:
    pass

def broken():
    raise OSError("cannot begin")
"""


@pytest.fixture
def called(tmp_path):
    """Gives a job a callback; says what it was told."""
    (tmp_path / "callbacks.py").write_text(CODE)

    def add(job, name="Watch", **arguments):
        job.directory = str(tmp_path)
        job.model.callbacks.append(f"callbacks.py:{name}")
        if name == "Watch":
            arguments["file"] = str(tmp_path / "told")
        job.model.callback_args[name].update(arguments)
        return lambda: [json.loads(line) for line in (tmp_path / "told").read_text().splitlines()]

    return add


PLANS = {
    "alone": ((4,), (1,)),
    "several": ((4,), (3,)),
    "stages": ((0, 2, 4), (2, 3, 2)),
    "narrow": ((1, 4), (3, 1)),
}


def stopped(plan, staleness):
    cuts, widths = PLANS[plan]
    return replace(wide(staleness, cuts=cuts, widths=widths), sizes=(13,) * 9)


def check_stopped(case, called, at, hook="on_step"):
    """Training ends on all workers with the state that plain PyTorch's has when it breaks there."""
    staleness = case.job.train.staleness
    told = called(case.job, stop=at, at=hook)
    states = []

    def after(step, dense, rows):
        states.append((dense, rows))
        return step == at + staleness

    expected = case.reference(after)
    pipeline = case.pipeline()
    for worker in chain(*(workers := pipeline.run())):
        assert worker.executor.progress.step == at + staleness == len(expected.losses)
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, states[-1][0][name], rtol=1e-4, atol=1e-4)
    for worker in workers[-1]:
        losses = worker.executor.progress.losses
        assert losses == pytest.approx(expected.losses, rel=1e-4)
    for name, table in (("first", "one"), ("second", "two")):
        found = pipeline.client.tables[TABLES + table].pull(np.arange(KEYS, dtype="u8"), True)
        rows = torch.from_numpy(found)
        torch.testing.assert_close(rows, states[-1][1][name], rtol=1e-4, atol=1e-4)
    return told()


@pytest.mark.parametrize(
    ("plan", "staleness"), [("alone", 0), ("alone", 2), ("several", 1), ("stages", 2)]
)
def test_a_training_ends_where_a_callback_says(called, plan, staleness):
    told = check_stopped(stopped(plan, staleness), called, 4)
    assert [(hook, step) for hook, step, *_ in told] == [
        ("on_begin", 0),
        *(("on_step", step) for step in range(1, 5 + staleness)),
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize("at", [1, 5, 7])
@pytest.mark.parametrize("staleness", [0, 1, 2])
@pytest.mark.parametrize("plan", PLANS)
def test_it_does_so_on_any_plan(called, plan, staleness, at):
    check_stopped(stopped(plan, staleness), called, at)


def test_one_that_stops_at_the_last_step_changes_nothing(called):
    case = stopped("several", 1)
    called(case.job, stop=8)
    for worker in chain(*case.pipeline().run()):
        assert worker.executor.progress.step == 9
        assert not worker.parts.stop.heard


@pytest.mark.parametrize("diverges", [False, True])
def test_it_ends_also_where_one_has_begun_more_steps_than_others(called, monkeypatch, diverges):
    """A worker has all of two steps behind the last one when another has none of them."""
    case = replace(stopped("narrow", 2), widths=(1, 2), micro_batches=2)
    forward = StageExecutor._forward_backward

    def slow(executor):
        if executor._place.rank == 1 and executor._open[-1].number >= 4:
            time.sleep(0.2)
        forward(executor)

    monkeypatch.setattr(StageExecutor, "_forward_backward", slow)
    if diverges:
        steps = case.batches()
        steps[4]["label.label"][:] = float("nan")
        monkeypatch.setattr(Case, "batches", lambda case: steps)
    else:
        called(case.job, stop=2)
    for worker in chain(*case.pipeline().run()):
        assert worker.executor.progress.step == 4
        assert bool(worker.diverged) == diverges


def test_a_training_that_ends_early_is_measured(tmp_path, called, monkeypatch):
    """Also where other steps are under way when it ends, in stages of several workers."""
    keys = torch.from_numpy(np.arange(40).reshape(20, 2) % KEYS)
    labels = torch.arange(20.0) % 2

    def given(job, split, size, rank, workers, stopped):
        for number in range(rank, 5, workers):
            part = slice(number * 4, number * 4 + 4)
            yield number, {"sparse": keys[part], "label.label": labels[part]}

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    found, case = [], stopped("stages", 2)
    case.job.train.validate.CopyFrom(ValidateSpec(every="2 steps", metric="valid_auc"))
    told = called(case.job, stop=4, at="on_eval")

    def between(worker):
        found.append(worker.executor.evaluate("valid").found)
        worker.executor.drain()

    pipeline = case.pipeline(between=between, folder=tmp_path / "cuts")
    for worker in chain(*pipeline.run()):
        assert worker.executor.progress.step == 6
    assert max(len(one["score."]) for one in found if one) == 20
    measured = [(step, more["valid_auc"]) for hook, step, *_, more, _, _ in told() if more]
    assert [step for step, _ in measured] == [2, 4, 6]


def test_what_callbacks_are_told_is_what_plain_pytorch_trains_on(called):
    job = job_of()
    job.train.optimizer.schedule, job.train.optimizer.warmup_steps = "constant", 2
    job.train.optimizer.learning_rate = 0.03
    told = called(job)
    steps = batches((24, 24, 24, 7))
    Pipeline(job, heads_model, [1, 3], [2, 3], steps, 4).run()
    lines = told()
    assert [line[0] for line in lines] == ["on_begin", *["on_step"] * 4]
    assert [line[4] for line in lines] == [0, 24, 48, 72, 79]
    assert [line[5] for line in lines[1:]] == pytest.approx([0.01, 0.02, 0.03, 0.03])
    assert all(line[7:] == [4, "job"] for line in lines)
    _, expected = plain(heads_loss, steps[:1])
    assert lines[1][3] == pytest.approx(expected[0], rel=1e-5)
    assert lines[1][2] == pytest.approx(sum(expected[0].values()), rel=1e-5)


@pytest.mark.parametrize("near", [5, 1])
def test_who_goes_on_from_a_cut_is_told_again_of_what_may_not_have_been(tmp_path, called, near):
    """And so ends where it was to end: the wish is no part of a cut."""
    case = stopped("stages", 2)
    case.job.train.checkpoint.every, case.job.train.checkpoint.keep = "1 steps", 100
    told = called(case.job, stop=4)
    for worker in chain(*case.pipeline(folder=tmp_path / "cuts").run()):
        assert worker.executor.progress.step == 6
    before = len(told())
    there = {int(one.name) for one in (tmp_path / "cuts").iterdir() if one.name.isdecimal()}
    cut = min(there, key=lambda one: abs(one - near))
    again = list(range(max(1, cut - 2), cut + 1))
    moved = replace(case, cuts=(1, 4), widths=(1, 2), micro_batches=3)
    resumed = {"folder": tmp_path / "cuts", "resume": f"{tmp_path}/cuts/{cut}", "attempt": 2}
    for worker in chain(*moved.pipeline(**resumed).run()):
        assert worker.executor.progress.step == 6
    since = told()[before:]
    assert since[0][:2] == ["on_begin", cut]
    assert [step for hook, step, *_ in since if hook == "on_step"] == [*again, *range(cut + 1, 7)]
    first = {line[1]: line[2] for line in told()[1:before]}
    for line in since[1:]:
        assert line[2] == pytest.approx(first[line[1]], rel=1e-3)


def test_who_has_heard_of_the_end_tells_whoever_goes_on():
    state = StageState.of_layers([{}])
    assert of_chunks(to_chunks(Beginning(3, state=state, stopped=True))).stopped
    assert not of_chunks(to_chunks(Beginning(3, state=state))).stopped


@pytest.mark.parametrize("plan", ["alone", "stages"])
@pytest.mark.parametrize(("hook", "step"), [("on_begin", 0), ("on_step", 3)])
def test_one_that_fails_ends_the_job_by_its_name(called, plan, hook, step):
    case = stopped(plan, 1)
    called(case.job, "Fails", hook=hook)
    said = rf"callbacks\.py:Fails: {hook} after step {step}: ConnectionError: no such luck"
    with pytest.raises(CallbackError, match=said):
        case.pipeline().run()


@pytest.mark.parametrize("how", ["in_place", "data", "gradient", "kept", "setting"])
def test_one_that_changes_what_is_trained_is_refused(called, how):
    job = job_of()
    called(job, "Changes", how=how)
    with pytest.raises(
        CallbackError, match=r"Changes: on_step after step 2 changed 'click\.(weight|in_features)"
    ):
        Pipeline(job, heads_model, [1, 3], [2, 3], batches(), 4).run()


SCHEDULED = """
import shared

def total(outputs, batch):
    return {"click": shared.now["rate"] * outputs["click"].square().mean()}
"""
SCHEDULES = """
import shared

class Schedules:
    calls = 0
    def on_step(self, state):
        self.calls += 1
        if state.step == 2:
            shared.now["rate"] = self.rate

    def __init__(self, rate):
        self.rate = rate
"""


def test_one_that_changes_what_a_loss_reads_is_refused(tmp_path):
    """Which only the worker that calls it would see."""
    (tmp_path / "shared.py").write_text('now = {"rate": 1.0}')
    (tmp_path / "callbacks.py").write_text(SCHEDULES)
    for rate in (1.0, 0.5):
        job = job_of(tmp_path, SCHEDULED)
        job.model.callbacks.append("callbacks.py:Schedules")
        job.model.callback_args["Schedules"].update({"rate": rate})
        pipeline = Pipeline(job, heads_model, [1, 3], [2, 3], batches(), 4)
        if rate == 1.0:
            pipeline.run()
            continue
        with pytest.raises(CallbackError, match=r"after step 2 changed 'rate', which the loss or"):
            pipeline.run()


@pytest.mark.parametrize("staleness", [0, 1])
def test_one_that_looks_changes_nothing(called, staleness):
    found = []
    for looks in (False, True):
        job = job_of(staleness=staleness)
        if looks:
            called(job, "Changes", how="looks")
        workers = Pipeline(job, heads_model, [3], [2], batches(), 4).run()
        for worker in chain(*workers):
            assert all(child.training for child in worker.module.modules())
        found.append([p.clone() for p in workers[-1][0].module.parameters()])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("Wrong", "'on_steps' is never called; expected on_begin, on_step, on_eval, on_end"),
        ("Nothing", "nothing that is called; expected on_begin"),
        ("broken", "failed: OSError: cannot begin"),
        ("Gone", "no callable 'Gone'"),
    ],
)
def test_one_that_would_not_be_called_is_refused(called, name, said):
    job = JobSpec()
    called(job, name)
    with pytest.raises(ModelError, match=rf"model\.callbacks: .*{said}"):
        job_callbacks(job)


def test_the_module_has_the_names_of_the_model(called, tmp_path):
    names = {name for name, _ in Heads().named_parameters()}
    (tmp_path / "callbacks.py").write_text(
        "import pathlib\nclass Names:\n    def on_step(self, state):\n"
        "        names = [name for name, _ in state.module.named_parameters()]\n"
        "        pathlib.Path(__file__).with_name('names').write_text(' '.join(names))\n"
    )
    job = job_of()
    job.directory = str(tmp_path)
    job.model.callbacks.append("callbacks.py:Names")
    Pipeline(job, heads_model, [1, 3], [1, 2], batches(), 4).run()
    found = set((tmp_path / "names").read_text().split())
    assert found == {name for name in names if name.startswith(("click", "kind"))}
