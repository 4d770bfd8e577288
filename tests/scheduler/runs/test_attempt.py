"""The states of an attempt, and what it makes of them for its job and its workers."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from protos import scheduler_pb2 as pb
from protos.decision_pb2 import Decision, PlanStage
from protos.job_pb2 import JobSpec
from protos.node_pb2 import SHARD, STAGE
from scheduler.runs.attempt import Attempt
from scheduler.runs.beginning import beginning_of
from scheduler.runs.calls import Channels, Interrupted
from scheduler.runs.changes.move import overtaken
from scheduler.runs.context import Context
from scheduler.runs.processes import AttemptId, Process
from scheduler.runs.states import State
from scheduler.state.endings import Ending
from scheduler.state.jobs import Jobs
from scheduler.state.leadership import Leadership
from scheduler.state.nodes import Nodes
from scheduler.state.store import DeposedError, Store, StoreError, TransitionError

# From each state, those that may come next.
LEGAL = {
    "NEW": "PROFILING RUNNING STOPPING HANDED_OVER",
    "PROFILING": "PLANNING STOPPING HANDED_OVER",
    "PLANNING": "STARTING STOPPING HANDED_OVER",
    "STARTING": "RUNNING STOPPING HANDED_OVER",
    "RUNNING": "STOPPING HANDED_OVER",
    "STOPPING": "ENDED HANDED_OVER",
    "ENDED": "",
    "HANDED_OVER": "",
}
WAYS = {
    "NEW": "",
    "PROFILING": "PROFILING",
    "PLANNING": "PROFILING PLANNING",
    "STARTING": "PROFILING PLANNING STARTING",
    "RUNNING": "PROFILING PLANNING STARTING RUNNING",
    "STOPPING": "STOPPING",
    "ENDED": "STOPPING ENDED",
    "HANDED_OVER": "HANDED_OVER",
}


@pytest.fixture
def context(store: Store) -> Context:
    jobs = Jobs(store)
    jobs.submit("job", JobSpec(name="job"))
    leadership = Leadership(store, "test")
    return Context(store, jobs, Nodes(store), Channels(), "127.0.0.1:1", leadership)


def new(context: Context, number: int = 1) -> Attempt:
    return Attempt(AttemptId("job", number, 1), context)


def at(context: Context, state: str) -> Attempt:
    attempt = new(context)
    for name in WAYS[state].split():
        attempt.move(State[name])
    assert attempt.state is State[state]
    return attempt


def entered(context: Context, *, up_to: State) -> Attempt:
    attempt = new(context)
    for state in (State.PROFILING, State.PLANNING, State.STARTING, State.RUNNING):
        attempt.enter(state)
        if state is up_to:
            break
    return attempt


def test_the_table_names_all_states() -> None:
    assert set(LEGAL) == set(WAYS) == {state.name for state in State}


def test_every_transition_is_legal_or_an_error(context: Context) -> None:
    for name, following in LEGAL.items():
        for wanted in State:
            attempt = at(context, name)
            if wanted.name in following.split():
                attempt.move(wanted)
                assert attempt.state is wanted
                continue
            with pytest.raises(TransitionError, match=f"attempt 1 cannot go from {name} to"):
                attempt.move(wanted)
            assert attempt.state is State[name]


def test_it_is_over_in_its_final_states_and_prepares_until_it_has_its_units(
    context: Context,
) -> None:
    over = {name for name in LEGAL if at(context, name).over.is_set()}
    assert over == {"ENDED", "HANDED_OVER"}
    preparing = {name for name in LEGAL if at(context, name).is_preparing}
    assert preparing - {"STOPPING"} == {"NEW", "PROFILING", "PLANNING"}


def test_what_is_stopped_before_it_has_its_units_prepares_until_it_has_cleaned_up(
    context: Context,
) -> None:
    for name, prepares in (("PLANNING", True), ("STARTING", False)):
        attempt = at(context, name)
        attempt.move(State.STOPPING)
        assert attempt.is_preparing is prepares
        attempt.move(State.ENDED)
        assert not attempt.is_preparing


def test_the_job_comes_to_the_states_that_it_shares(context: Context) -> None:
    attempt = new(context, number=3)
    for state in (State.PROFILING, State.PLANNING, State.STARTING, State.RUNNING):
        attempt.set_reason("waits for something")
        attempt.enter(state)
        status = context.jobs.get("job")
        assert status is not None
        assert pb.JobState.Name(status.state) == state.name
        assert (status.attempt, status.reason) == (3, "")
        assert status.began_at > 0
        assert (status.started_at > 0) == (state is State.RUNNING)


def test_a_state_out_of_turn_leaves_the_job_as_it_is(context: Context) -> None:
    attempt = entered(context, up_to=State.PROFILING)
    with pytest.raises(TransitionError):
        attempt.enter(State.RUNNING)
    assert context.jobs.state("job") == pb.PROFILING


def test_a_cancelled_attempt_enters_nothing_and_ends_as_the_first_word_says(
    context: Context,
) -> None:
    attempt = entered(context, up_to=State.PROFILING)
    attempt.cancel(Ending(pb.END_DEADLINE))
    attempt.cancel()
    assert attempt.ending.reason == pb.END_DEADLINE
    with pytest.raises(Interrupted):
        attempt.enter(State.PLANNING)
    assert attempt.state is State.PROFILING
    assert context.jobs.state("job") == pb.PROFILING


def test_an_attempt_at_a_job_that_has_ended_is_interrupted(context: Context) -> None:
    context.jobs.end("job", Ending(pb.END_CANCELLED))
    with pytest.raises(Interrupted):
        new(context).enter(State.PROFILING)


def test_a_report_counts_while_it_starts_and_trains_and_a_last_word_is_kept(
    context: Context,
) -> None:
    attempt = entered(context, up_to=State.PLANNING)
    word = pb.ProgressReport(job_id="job", attempt=1, phase="trained", step=7)
    word.loss, word.loss_terms["click"] = 0.5, 0.25
    assert not attempt.report(word)
    assert context.store.finals("job") == []
    attempt.enter(State.STARTING)
    attempt.decision = Decision(stages=[PlanStage(type="cpu", units=1)])
    attempt.follower = attempt.new_follower()
    assert not attempt.report(word)
    assert [one.step for one in context.store.finals("job")] == [7]
    status = context.jobs.get("job")
    assert status is not None
    assert status.step == 7
    assert (status.loss, status.loss_terms) == (0.5, {"click": 0.25})
    assert attempt.report(pb.ProgressReport(job_id="job", attempt=2))  # another one's worker
    attempt.cancel()
    assert attempt.report(word)


def test_nothing_is_taken_in_once_another_scheduler_has_it(context: Context) -> None:
    attempt = entered(context, up_to=State.RUNNING)
    attempt.hand_over()
    assert attempt.is_cancelled()
    with pytest.raises(StoreError, match="another one takes over"):
        attempt.report(pb.ProgressReport(job_id="job", attempt=1))


def record(attempt: int) -> pb.RunRecord:
    node = pb.NodeStatus(node_id="n", kind="node", type="cpu", units=2, address="127.0.0.1:2")
    placed = [
        Process("job.shard-0", "shard 0", SHARD, 0, 0, node, "127.0.0.1:3"),
        Process("job.stage-0-worker-0", "stage 0 worker 0", STAGE, 0, 0, node, "127.0.0.1:4"),
    ]
    kept = [process.to_message() for process in placed]
    return pb.RunRecord(attempt=attempt, processes=kept, units=["n", "n"], start_s=2.5)


def test_a_run_is_taken_up_with_all_that_was_kept_of_it(context: Context) -> None:
    entered(context, up_to=State.RUNNING)
    before = context.jobs.get("job")
    context.store.put_decision("job", Decision(stages=[PlanStage(type="cpu", units=1)]))
    for number in (1, 2):
        word = pb.ProgressReport(job_id="job", attempt=number, phase="done", output=f"by {number}")
        context.store.put_final(word)
    attempt = new(context)
    attempt.take_up(record(1))
    assert attempt.state is State.RUNNING
    assert context.jobs.get("job") == before
    assert attempt.shards() == [("shard 0", "127.0.0.1:3")]
    assert [process.pid for process in attempt.processes] == [0, 0]
    assert attempt.started_s == 2.5
    assert [node.units_used for node in context.nodes.listed()] == [2]
    assert attempt.follower is not None
    outcome = attempt.follower.follow(attempt.is_cancelled)
    assert outcome.report is not None
    assert outcome.report.output == "by 1"


@pytest.mark.parametrize("change", [False, True])
def test_a_run_is_taken_up_with_units_of_as_many_cores_as_it_had(
    context: Context, change: bool
) -> None:
    entered(context, up_to=State.RUNNING)
    decision = Decision(stages=[PlanStage(type="cpu", units=1, threads=2)])
    decision.resources.types.add(name="cpu", threads=2, node_units=2)
    kept = record(1)
    for placed in kept.processes:
        placed.node.units = 4
    if change:  # the job's was not written any more
        kept.decision.CopyFrom(decision)
    else:
        context.store.put_decision("job", decision)
    attempt = new(context)
    attempt.take_up(kept)
    assert [node.units_used for node in context.nodes.listed()] == [4]
    context.nodes.give_back("job", ["n"])
    assert [node.units_used for node in context.nodes.listed()] == [2]


def test_a_scheduler_that_takes_over_knows_the_cuts_that_were_told_of(context: Context) -> None:
    attempt = entered(context, up_to=State.RUNNING)
    report = pb.ProgressReport(job_id="job", attempt=1, phase="train", step=25)
    for step in (20, 10):
        report.cuts.cuts.add(step=step, attempt=1, samples=step * 16)
    report.rank = 1  # only the first worker of the first stage tells of cuts
    attempt.report(report)
    assert Jobs(context.store).all()[0].cuts == []
    report.rank = 0
    attempt.report(report)
    attempt.cancel()
    report.cuts.cuts.add(step=30, attempt=1)
    assert attempt.report(report), "it is to stop, but this one counts"
    after = Context(
        *(context.store, Jobs(context.store), context.nodes, context.channels),
        *(context.address, context.leadership),
    )
    status = after.jobs.get("job")
    assert status is not None
    assert [cut.step for cut in status.cuts] == [10, 20, 30]
    taken_up = new(after)
    taken_up.take_up(record(1))
    after.jobs.retry("job", Ending(pb.END_SCHEDULER_LOST, "gone"))
    again = after.jobs.get("job")
    assert again is not None
    begins = beginning_of(again, JobSpec(), "127.0.0.1:2")
    assert begins.step == 30


def test_cuts_and_progress_of_a_generation_that_was_given_up_count_no_more(
    context: Context,
) -> None:
    attempt = entered(context, up_to=State.RUNNING)
    attempt.decision.stages.add(type="cpu", units=1)
    attempt.run([], [])
    attempt.follower = attempt.new_follower()

    def report(step: int, *cuts: int, generation: int) -> pb.ProgressReport:
        made = pb.ProgressReport(
            job_id="job", attempt=1, generation=generation, phase="train", step=step
        )
        for cut in cuts:
            made.cuts.cuts.add(step=cut, attempt=1)
        return made

    attempt.report(report(12, 10, generation=0))
    attempt.record.next_generation()
    assert not attempt.report(report(25, 10, 20, generation=0)), "it is not to stop, but to regroup"
    attempt.add_progress(report(25, generation=0))
    status = context.jobs.get("job")
    assert status is not None
    assert ([cut.step for cut in status.cuts], status.step) == ([10], 12)
    attempt.go_on(0)
    attempt.report(report(15, 10, 15, generation=1))
    status = context.jobs.get("job")
    assert status is not None
    assert ([cut.step for cut in status.cuts], status.step) == ([10, 15], 15)


@pytest.mark.parametrize("kept", [None, record(1)])
def test_an_attempt_of_which_too_little_is_known_is_stopped(
    context: Context, kept: pb.RunRecord | None
) -> None:
    attempt = new(context)
    attempt.give_up(pb.STARTING, kept)
    assert attempt.state is State.STOPPING
    assert attempt.may_run_unseen
    assert len(attempt.processes) == (2 if kept else 0)
    assert attempt.ending.reason == pb.END_SCHEDULER_LOST
    assert attempt.ending.text == "the scheduler was restarted while the job was starting"


def test_whoever_takes_over_in_the_midst_of_a_move_finds_one_plan_with_its_workers(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decided(kind: str) -> Decision:
        made = Decision(feasible=True)
        made.stages.add(type=kind, units=1)
        return made

    def taken_up() -> Attempt:
        kept = context.store.run("job")
        assert kept is not None
        made = new(context)
        made.take_up(kept)
        return made

    attempt = entered(context, up_to=State.RUNNING)
    attempt.decision = decided("before")
    attempt.keep(attempt.decision)
    own, other = ([Process.of(p)] for p in record(1).processes[:2])
    attempt.run(own, [own[0].node.node_id])
    attempt.record.note_change(pb.Move(after="1 v100", failed="not yet"))
    attempt.record.add_others(other)
    attempt.record.next_generation()
    found = taken_up()
    assert (found.processes, found.record.others) == (own, other)
    assert found.record.change == pb.Move(after="1 v100", failed="not yet")
    assert found.decision.stages[0].type == "before"
    assert found.record.is_regrouping

    def dies(job_id: str, decision: Decision) -> None:
        raise DeposedError("it dies here")

    with monkeypatch.context() as patched:
        patched.setattr(context.store, "put_decision", dies)
        with pytest.raises(Interrupted):
            attempt.go_over(decided("after"), other, pb.Move(after="1 v100"))
    found = taken_up()
    assert found.record.change == pb.Move(after="1 v100")
    assert (found.processes, found.record.others) == (other, own)
    assert found.decision.stages[0].type == "after"
    assert context.store.decision("job") == found.decision
    assert found.record.line == found.record.generation == 1


def test_a_change_is_told_where_whoever_takes_over_is_stopped_before_it_begins_again(
    context: Context,
) -> None:
    attempt = entered(context, up_to=State.RUNNING)
    attempt.record.note_change(pb.Move(after="1 v100", failed="the scheduler died"))
    kept = context.store.run("job")
    assert kept is not None
    found = new(context)
    found.take_up(kept)
    for _ in range(2):
        overtaken(found)
        told = context.jobs.get("job")
        assert told is not None
        assert [move.failed for move in told.moves] == ["the scheduler died"]
        assert found.record.change is None


def test_whoever_takes_over_when_a_shard_is_another_believes_no_state_of_before(
    context: Context,
) -> None:
    attempt = entered(context, up_to=State.RUNNING)
    shard, worker = (Process.of(placed) for placed in record(1).processes)
    attempt.run([shard, worker], ["n", "n"])
    generation = attempt.record.next_generation()
    assert attempt.record.line < generation
    elsewhere = pb.NodeStatus(node_id="m", kind="node", type="cpu", units=1, address="127.0.0.1:5")
    other = Process("job.shard-0.g1", "shard 0, generation 1", SHARD, 0, 0, elsewhere, "there")
    attempt.place([other, worker], ["m"])
    kept = context.store.run("job")
    assert kept is not None
    after = new(context)
    after.take_up(kept)
    assert after.processes == [other, worker]
    assert after.record.others == [shard]
    assert after.record.line == generation
    assert sorted(kept.units) == ["m", "n"]
    assert (after.record.units_of_shards("n"), after.record.units_of_shards("m")) == (0, 1)


def test_a_write_waits_for_redis_and_not_for_another_scheduler(
    context: Context, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(error: StoreError, times: int) -> tuple[Callable[[], None], list[int]]:
        calls: list[int] = []

        def write() -> None:
            calls.append(1)
            if len(calls) <= times:
                raise error

        return write, calls

    monkeypatch.setattr("scheduler.runs.attempt._PAUSE_S", 0.01)
    attempt = new(context)
    write, calls = failing(StoreError("away"), 90)  # however long
    attempt.persist(write)
    assert len(calls) == 91
    with pytest.raises(Interrupted):
        attempt.persist(failing(DeposedError("another"), 9)[0])
    attempt.cancel()
    with pytest.raises(Interrupted):
        attempt.persist(failing(StoreError("away"), 9)[0])


def test_validations_are_told_and_those_of_lost_steps_forgotten(context: Context) -> None:
    def told() -> list[tuple[int, float | None]]:
        status = context.jobs.get("job")
        assert status is not None
        return [(one.step, one.metrics.get("valid_auc")) for one in status.validated]

    def report(*steps: int) -> None:
        found = [pb.Validated(step=step, metrics={"valid_auc": step / 10}) for step in steps]
        attempt.add_progress(pb.ProgressReport(attempt=1, phase="train", validated=found))

    attempt = entered(context, up_to=State.RUNNING)
    report(1, 2, 3)
    attempt.add_progress(pb.ProgressReport(attempt=1, phase="train"))  # another stage's worker
    assert told() == [(1, 0.1), (2, 0.2), (3, 0.3)]
    report(2, 3, 4)
    assert told() == [(2, 0.2), (3, 0.3), (4, 0.4)]
    attempt.recovered(pb.Recovery(step=3, back=True), [], 0)
    assert told() == [(2, 0.2), (3, 0.3)]
    assert context.jobs.retry("job", Ending(pb.END_SCHEDULER_LOST))
    assert told() == []


def test_a_plan_with_other_shards_holds_their_units_and_no_others(context: Context) -> None:
    """One of them on the node that the shard before has, of which a worker had a unit."""
    attempt = entered(context, up_to=State.RUNNING)
    shard, worker = (Process.of(placed) for placed in record(1).processes)
    attempt.run([shard, worker], ["n", "n"])
    attempt.record.next_generation()
    elsewhere = pb.NodeStatus(node_id="m", kind="node", type="cpu", units=2, address="127.0.0.1:5")
    others = [
        Process("job.shard-0.g1", "shard 0, generation 1", SHARD, 0, 0, shard.node, "here"),
        Process("job.shard-1.g1", "shard 1, generation 1", SHARD, 1, 0, elsewhere, "there"),
        replace(worker, process_id="job.stage-0-worker-0.g1", node=elsewhere),
    ]
    attempt.go_over(Decision(feasible=True), others, pb.Move(after="1 v100"), ["n", "m", "m"])
    kept = context.store.run("job")
    assert kept is not None
    assert sorted(kept.units) == ["m", "m", "m", "n"]
    assert sorted(kept.of_shards) == ["m", "m", "n"]
    after = new(context)
    after.take_up(kept)
    assert after.processes == others
    assert after.record.others == [shard, worker]
