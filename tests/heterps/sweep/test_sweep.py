"""Trials as jobs of a cluster that is made up: what they report, how they end, who dies when."""

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import optuna
import pytest

from heterps.client.records import Job, State, Validated
from heterps.errors import UnknownJobError, UnreachableError
from heterps.sweep import study
from heterps.sweep import sweep as running
from heterps.sweep.best import BestModel
from heterps.sweep.errors import SweepError
from heterps.sweep.space import Space
from heterps.sweep.study import Study, TrialState
from heterps.sweep.sweep import Sweep
from tests.heterps.sweep_jobs import write_job

LR = "train.optimizer.learning_rate"
COMPLETE, PRUNED, FAILED = TrialState.COMPLETE, TrialState.PRUNED, TrialState.FAILED
BLANK = Job("", "", State.RUNNING, "", 0, 0, 0, "", 0, 30, 0, 0, 0, {}, "")


@dataclass
class Outcome:
    """How a job goes: what each validation gives, and how it ends.

    A job shows one validation more each time that it is looked at, then its end.
    """

    validations: tuple[float | None, ...] = ()
    state: State = State.SUCCEEDED
    end_reason: str = "succeeded"
    metric: float | None = None  # of the model; None: the best
    cancelled_by: str = ""


@dataclass
class MadeUp:
    """A cluster whose jobs go as `outcome` says of their learning rate."""

    outcome: Callable[[float], Outcome]
    jobs: dict = field(default_factory=dict)
    looks: dict = field(default_factory=dict)
    cancelled: list = field(default_factory=list)
    fetched: list = field(default_factory=list)
    most_at_once: int = 0
    on_look: Callable[[str], None] = lambda job_id: None

    def submit(self, job, job_id):
        assert job_id not in self.jobs
        self.jobs[job_id] = job
        self.looks[job_id] = 0
        live = [one for one in self.jobs if not self._status(one).state.is_final]
        self.most_at_once = max(self.most_at_once, len(live))

    def status(self, job_id):
        self.on_look(job_id)
        if job_id not in self.jobs:
            raise UnknownJobError(job_id)
        self.looks[job_id] += 1
        return self._status(job_id)

    def cancel(self, job_id):
        self.cancelled.append(job_id)
        return self._status(job_id)

    def get(self, job_id, to):
        self.fetched.append(job_id)
        Path(to).mkdir()
        (to / ".heterps-output").write_text("Signature: heterps-output-7d1c0c64\n")
        (to / "metrics.json").write_text(json.dumps({"job_id": job_id}))
        (to / "model.json").write_text("{}")

    def _status(self, job_id):
        outcome = self.outcome(self.jobs[job_id].train.optimizer.learning_rate)
        seen = outcome.validations[: self.looks[job_id]]
        told = tuple(
            Validated(10 * (at + 1), {} if value is None else {"valid_auc": value})
            for at, value in enumerate(seen)
        )
        job = replace(BLANK, job_id=job_id, validated=told)
        if self.looks[job_id] <= len(outcome.validations):
            return replace(job, state=State.CANCELLED) if job_id in self.cancelled else job
        given = [value for value in outcome.validations if value is not None]
        metric = outcome.metric if outcome.metric is not None else max(given, default=None)
        return replace(
            job,
            state=outcome.state,
            end_reason=outcome.end_reason,
            error="what broke it",
            cancelled_by=outcome.cancelled_by,
            metrics={} if metric is None else {"valid_auc": metric},
        )


@pytest.fixture(autouse=True)
def hurried(monkeypatch, request):
    """Nothing waits; studies are in memory, but of tests that ask for `on_disk`."""
    monkeypatch.setattr(running, "_POLL_S", 0.0)
    if "on_disk" not in request.fixturenames:
        storages = defaultdict(optuna.storages.InMemoryStorage)
        monkeypatch.setattr(study, "storage_in", lambda file: storages[file])


@pytest.fixture
def on_disk():
    pass


@dataclass
class Made:
    cluster: MadeUp
    study: Study
    model: BestModel
    sweep: Sweep

    @property
    def states(self):
        return [trial.state for trial in self.study.trials]


@pytest.fixture
def make(tmp_path):
    file = write_job(tmp_path)

    def made(outcome, assignments=("lr=float:0.001..1",), pruned=True, **cluster):
        known = cluster.pop("cluster", None) or MadeUp(outcome, **cluster)
        space = Space(file, assignments)
        opened = Study(tmp_path / "job.study", space, space.aim(None), pruned=pruned)
        model = BestModel(tmp_path / "best")
        return Made(known, opened, model, Sweep(known, opened, space, model, known.submit))

    return made


def test_the_best_is_that_of_most_and_its_model_is_kept(make):
    made = make(lambda lr: Outcome((lr / 2, lr)))
    made.sweep.run(4)
    assert made.states == [COMPLETE] * 4
    best = made.study.best
    assert best.value == max(trial.values[LR] for trial in made.study.trials) == best.values[LR]
    assert made.model.holds(best)
    assert made.cluster.most_at_once == 1
    assert {job.SerializeToString(deterministic=True) for job in made.cluster.jobs.values()}
    names = [job.name for job in made.cluster.jobs.values()]
    assert names == [f"clicks-trial-{number}" for number in range(4)]
    assert all(
        job.startswith(f"{name}-") for job, name in zip(made.cluster.jobs, names, strict=True)
    )


def test_a_metric_that_is_to_be_small_is(make):
    logloss = "train.validate.metric=min:valid_auc"
    made = make(lambda lr: Outcome((lr,)), ("lr=float:0.001..1", logloss))
    made.sweep.run(4)
    assert made.study.best.value == min(trial.values[LR] for trial in made.study.trials)


def test_several_run_at_once_and_no_more_than_asked_for(make):
    made = make(lambda lr: Outcome((lr, lr, lr)))
    made.sweep.run(7, parallel=3)
    assert made.cluster.most_at_once == 3
    assert made.states == [COMPLETE] * 7


@pytest.mark.parametrize(
    ("outcome", "reason"),
    [
        (Outcome((0.99,), State.FAILED, "diverged"), "diverged: what broke it"),
        (Outcome((0.99,), State.FAILED, "lost_node"), "lost_node: what broke it"),
        (Outcome((0.99,), State.CANCELLED, cancelled_by="ada"), "cancelled by ada"),
        (Outcome((0.99,), metric=float("nan")), "valid_auc is no number"),
        (Outcome((0.99,), metric=float("inf")), "valid_auc is no number"),
        (Outcome(()), "valid_auc is no number"),
    ],
)
def test_a_trial_that_has_no_value_is_never_the_best(make, outcome, reason):
    made = make(lambda lr: outcome if lr > 0.3 else Outcome((lr,)))
    made.sweep.run(6)
    without = [trial for trial in made.study.trials if trial.values[LR] > 0.3]
    assert without
    assert {(trial.state, trial.value, trial.reason) for trial in without} == {
        (FAILED, None, reason)
    }
    assert made.study.best.values[LR] <= 0.3
    assert made.model.holds(made.study.best)
    assert len(made.states) == 6


@pytest.mark.parametrize(
    ("metric", "turned"), [("max:valid_auc", lambda v: v), ("min:valid_auc", lambda v: 1 - v)]
)
def test_trials_that_most_others_are_better_than_are_cancelled(make, metric, turned):
    values = iter([0.8] * 6 + [0.7, 0.9, 0.7])
    of = {}

    def outcome(lr):
        if lr not in of:
            of[lr] = next(values)
        found = (of[lr] - 0.1, of[lr], of[lr])
        return Outcome(tuple(map(turned, found)), metric=turned(of[lr]))

    made = make(outcome, ("lr=float:0.001..1", f"train.validate.metric={metric}"))
    made.sweep.run(9)
    assert made.states == [COMPLETE] * 6 + [PRUNED, COMPLETE, PRUNED]
    pruned = [trial for trial in made.study.trials if trial.state is PRUNED]
    assert [trial.job_id for trial in pruned] == made.cluster.cancelled
    assert all(trial.value is None for trial in pruned)
    assert all("after step 10: most others had better" in trial.reason for trial in pruned)
    assert all(job.startswith("clicks-trial-") for job in made.cluster.cancelled)
    made.sweep.run(9)
    assert len(made.states) == 9


def test_without_pruning_every_trial_ends(make):
    made = make(lambda lr: Outcome((lr, lr, lr)), pruned=False)
    made.sweep.run(12)
    assert made.states == [COMPLETE] * 12


def test_trials_are_held_against_one_another_after_as_many_samples(make):
    made = make(
        lambda lr: Outcome((None, lr, lr)), ("lr=float:0.001..1", "train.batch_size=choice:64,128")
    )
    made.sweep.run(4)
    storage = study.storage_in(made.study.file)
    kept = optuna.load_study(study_name="clicks", storage=storage).trials
    for trial, job in zip(kept, made.cluster.jobs.values(), strict=True):
        samples = [20 * job.train.batch_size, 30 * job.train.batch_size]
        assert trial.intermediate_values == dict.fromkeys(samples, trial.params[LR])


def test_one_that_has_ended_when_it_is_to_be_pruned_is_complete(make):
    made = make(lambda lr: Outcome((lr,)))
    made.cluster.cancel = made.cluster.status
    made.sweep.run(9)
    assert made.states == [COMPLETE] * 9


def test_values_of_a_complete_trial_are_not_trained_again(make):
    made = make(lambda lr: Outcome((lr,)), ("lr=choice:0.1,0.2,0.3",), pruned=False)
    made.sweep.run(8)
    assert made.states == [COMPLETE] * 8
    assert len(made.cluster.jobs) <= 3
    assert all(trial.value == trial.values[LR] for trial in made.study.trials)


def test_what_is_interrupted_runs_again_and_counts_once(make):
    made = make(lambda lr: Outcome((lr, lr)))
    looked = []

    def look(job_id):
        looked.append(job_id)
        if len(looked) == 8:
            raise KeyboardInterrupt

    made.cluster.on_look = look
    with pytest.raises(KeyboardInterrupt):
        made.sweep.run(5, parallel=2)
    made.sweep.cancel()
    interrupted = [t for t in made.study.trials if t.state is TrialState.INTERRUPTED]
    assert {trial.job_id for trial in interrupted} == {*made.cluster.cancelled}
    assert interrupted
    again = make(None, cluster=made.cluster)
    again.sweep.run(5, parallel=2)
    counted = [trial for trial in again.study.trials if trial.state.counts]
    assert [trial.state for trial in counted] == [COMPLETE] * 5
    values = [trial.values for trial in counted]
    assert all(trial.values in values for trial in interrupted)
    assert len({trial.values[LR] for trial in counted}) == 5
    again.sweep.run(5)
    assert len(again.cluster.jobs) == 5 + len(interrupted)


@pytest.mark.parametrize("fate", ["ended", "runs", "cancelled", "gone"])
def test_a_sweep_that_was_killed_takes_its_trials_up(make, fate):
    made = make(lambda lr: Outcome((lr, lr, lr)))

    def die(job_id):
        if len(made.cluster.jobs) == 3 and made.cluster.looks[job_id] == 2:
            raise SystemExit

    made.cluster.on_look = die
    with pytest.raises(SystemExit):
        made.sweep.run(5)
    made.cluster.on_look = lambda job_id: None
    last = made.study.trials[-1]
    assert last.state is TrialState.RUNNING
    if fate == "ended":
        made.cluster.looks[last.job_id] = 3
    elif fate == "cancelled":
        made.cluster.cancelled.append(last.job_id)
    elif fate == "gone":
        del made.cluster.jobs[last.job_id]
    again = make(None, cluster=made.cluster)
    again.sweep.run(5)
    counted = [trial for trial in again.study.trials if trial.state.counts]
    assert [trial.state for trial in counted] == [COMPLETE] * 5
    assert sum(trial.values == last.values for trial in counted) == 1
    taken_up = fate in ("ended", "runs")
    assert len(again.study.trials) == (5 if taken_up else 6)
    assert len({trial.job_id for trial in counted}) == 5
    assert (last.job_id in {trial.job_id for trial in counted}) == taken_up


def test_one_that_dies_before_it_submits_leaves_no_trial_out(make, on_disk):
    made = make(lambda lr: Outcome((lr,)))
    asked = made.study.ask()
    again = make(lambda lr: Outcome((lr,)))
    again.sweep.run(3)
    counted = [trial for trial in again.study.trials if trial.state.counts]
    assert len(counted) == len(again.cluster.jobs) == 3
    assert asked.trial.values in [trial.values for trial in counted]


def test_a_scheduler_that_is_away_for_a_moment_is_waited_for(make):
    made = make(lambda lr: Outcome((lr, lr)))
    away = iter([True, False, True, True, False, False])

    def look(job_id):
        if next(away, False):
            raise UnreachableError("away")

    made.cluster.on_look = look
    made.sweep.run(2)
    assert made.states == [COMPLETE] * 2


def test_a_sweep_whose_first_jobs_all_break_ends(make):
    made = make(lambda lr: Outcome((), State.FAILED, "user_error"))
    with pytest.raises(SweepError, match="3 trials failed, and none is complete"):
        made.sweep.run(20)
    assert made.states == [FAILED] * 3


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"assignments": ("lr=float:0.001..2",)}, f"{LR}: got "),
        ({"assignments": ("lr=float:0.001..1", "train.epochs=3")}, "train.epochs: got 3"),
        ({"assignments": ("lr=float:0.001..1", "train.seed=int:0..9")}, "train.seed: got "),
        (
            {"assignments": ("lr=float:0.001..1", "train.validate.metric=valid_logloss")},
            "it compares by max:valid_auc",
        ),
    ],
)
def test_a_study_of_another_sweep_is_refused(make, changed, said):
    make(None)
    with pytest.raises(SweepError) as refused:
        make(None, **changed)
    assert "of another sweep" in str(refused.value)
    assert said in str(refused.value)


def test_a_study_of_another_model_is_refused(make, tmp_path):
    make(None)
    with (tmp_path / "model.py").open("a") as file:
        file.write("# changed\n")
    with pytest.raises(SweepError, match=r"model\.py:build has changed"):
        make(None)


@pytest.mark.parametrize("split", ["train", "valid"])
def test_trials_of_other_data_are_not_held_against_those_before(make, tmp_path, split):
    made = make(lambda lr: Outcome((lr,)))
    made.sweep.run(2)
    head, first, *rows = (tmp_path / f"{split}.csv").read_text().splitlines(keepends=True)
    (tmp_path / f"{split}.csv").write_text("".join([head, *rows]))
    again = make(None, cluster=made.cluster)
    with pytest.raises(SweepError, match=rf"data\.{split}: {split}\.csv: it has changed since"):
        again.sweep.run(3)
    again.sweep.cancel()
    assert again.states[2] is TrialState.INTERRUPTED
    (tmp_path / f"{split}.csv").write_text("".join([head, first, *rows]))
    last = make(None, cluster=made.cluster)
    last.sweep.run(3)
    assert [state for state in last.states if state.counts] == [COMPLETE] * 3


def test_trials_may_name_other_files_to_join_to_held_out_data(make, tmp_path):
    for name, value in (("one", 1), ("two", 2)):
        (tmp_path / f"{name}.csv").write_text(f"x,more\n1,{value}\n2,{value}\n")
    ranges = ("lr=float:0.001..1", "data.join.side.file=choice:one.csv,two.csv")
    joined = ("data.join.side.by=[x]", "data.dense=[x, side.more]")
    made = make(lambda lr, **_: Outcome((lr,)), (*ranges, *joined))
    made.sweep.run(6)
    found = {trial.values["data.join.side.file"] for trial in made.study.trials}
    assert found == {"one.csv", "two.csv"}


def test_a_file_that_is_no_study_is_refused_and_left(make, tmp_path, on_disk):
    (tmp_path / "job.study").write_text("notes")
    with pytest.raises(SweepError, match="expected a study of a sweep, or no file"):
        make(None)
    assert (tmp_path / "job.study").read_text() == "notes"


def test_a_folder_of_somebody_else_is_not_taken_for_the_model(tmp_path):
    (tmp_path / "best").mkdir()
    (tmp_path / "best/thesis.tex").write_text("years of work")
    with pytest.raises(SweepError, match="name another with --output"):
        BestModel(tmp_path / "best")
