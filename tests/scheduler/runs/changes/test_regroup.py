"""Workers that are killed are replaced while the others go on, and the result is the same."""

import json
import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_SUCCEEDED,
    END_WORKER_CRASHED,
    FAILED,
    JobRequest,
    JobStatus,
)
from tests.rounds import more
from tests.scheduler.runs.survivors import (
    ALONE,
    SHAPE,
    Service,
    logged,
    move,
    plan,
    trains,
    used,
)
from tests.waiting import wait_until

pytest.importorskip("workers.stage")


@pytest.mark.parametrize(
    ("stage", "rank"),
    [
        (0, 0),
        *(pytest.param(*at, marks=pytest.mark.exhaustive) for at in ((0, 1), (1, 0), (1, 1))),
    ],
)
def test_the_others_keep_their_processes_and_the_result_is_the_same_to_the_bit(
    service: Service, unfailed: str, stage: int, rank: int
) -> None:
    name = f"killed-{stage}-{rank}"
    spec = service.job(name)
    spec.retries = 1
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    before = service.pids(name)
    victim = f"stage {stage} worker {rank}"
    os.kill(before.pop(victim), signal.SIGKILL)
    wait_until(lambda: service.recovered(name), "it is replaced")
    after = service.pids(name)
    assert {label: after.get(label) for label in before} == before
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [victim]
    assert 4 <= recovery.step < SHAPE.steps
    assert 0 < recovery.stood_s < 60
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_workers_of_a_gpu_type_that_is_emulated_are_replaced_as_on_cpus(
    service: Service, unfailed: str
) -> None:
    name = "emulated"
    resources = json.loads((service.directory / "resources.json").read_text())
    for kind in resources["types"]:
        if kind["name"] != "cpu":
            kind["device"] = "cuda"
    (service.directory / "gpus.json").write_text(json.dumps(resources))
    spec = service.job(name, **{"schedule.resources": "gpus.json"})
    spec.retries = 2
    service.submit(spec)
    for count, victim in enumerate(("stage 0 worker 1", "stage 1 worker 0"), 1):
        trains(service, name, 3 * count)
        os.kill(service.pids(name)[victim], signal.SIGKILL)
        wait_until(lambda: len(service.recovered(name)) >= count, "it is replaced")  # noqa: B023
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert {kind.device for kind in plan(service, name).resources.types} == {"cpu", "cuda"}
    assert service.digest(name) == unfailed


@pytest.mark.parametrize(
    ("when", "rank"),
    [
        ("before it is staged", 1),
        *(
            pytest.param(*at, marks=pytest.mark.exhaustive)
            for at in (
                ("before it is staged", 0),
                ("after it is staged", 0),
                ("after it is staged", 1),
                ("before they are committed", 0),
                ("after they are committed", 0),
            )
        ),
    ],
)
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_a_part_of_the_rows_is_lost_with_no_worker(
    service: Service, when: str, rank: int, staleness: int
) -> None:
    name = f"{when.replace(' ', '-')}-{rank}-{staleness}"
    fault = {"model.entry": "fault.py:build", "model.args.when": when, "model.args.rank": rank}
    spec = service.job(name, **fault, **{"train.clip": 0, "train.staleness": staleness})
    spec.retries = 1
    service.submit(spec)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [f"stage 0 worker {rank}"]
    assert (service.result(name).trained == SHAPE.steps / SHAPE.steps_per_epoch).all()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("staleness", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_who_waits_for_a_verdict_takes_that_of_others(
    service: Service, unfailed: str, rank: int, staleness: int
) -> None:
    name = f"in-doubt-{rank}-{staleness}"
    fault = {"model.entry": "fault.py:unjudged", "model.args.rank": rank}
    spec = service.job(name, **fault, **{"train.staleness": staleness})
    spec.retries = 1
    service.submit(spec)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    (recovery,) = status.recoveries
    assert list(recovery.lost) == [f"stage 1 worker {rank}"]
    assert recovery.step in (6, 7)  # where stage 0 was not done with it, nobody takes it
    assert not recovery.back
    if not staleness:
        assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_one_death_after_another_before_a_step_is_over(service: Service, unfailed: str) -> None:
    name = "killed-again"
    spec = service.job(name)
    spec.retries = 3
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    for count, victim in enumerate(("stage 0 worker 1", "stage 1 worker 0", "stage 0 worker 0"), 1):
        pids = {label.partition(",")[0]: pid for label, pid in service.pids(name).items()}
        os.kill(pids[victim], signal.SIGKILL)
        wait_until(lambda: len(service.recovered(name)) >= count, "it is replaced", pause_s=0.001)  # noqa: B023
    status = service.end(name)
    assert (status.end_reason, status.attempt, len(status.recoveries)) == (END_SUCCEEDED, 1, 3)
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_a_disk_that_is_full_meanwhile_ends_nothing(service: Service, unfailed: str) -> None:
    name = "full-meanwhile"
    spec = service.job(name, **{"model.entry": "fault.py:full"})
    spec.retries = 1
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    os.kill(service.pids(name)["stage 0 worker 0"], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert len(status.recoveries) == 1
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_two_at_once(service: Service, unfailed: str) -> None:
    name = "two-killed"
    spec = service.job(name)
    spec.retries = 2
    service.submit(spec)
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    pids = service.pids(name)
    for victim in ("stage 0 worker 0", "stage 1 worker 1"):
        os.kill(pids[victim], signal.SIGKILL)
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert service.digest(name) == unfailed


def killed(service: Service, spec: JobSpec, *victims: str, at: int = 8) -> JobStatus:
    """Kill some workers of a job once it has come to a step; its status when it goes on.

    All others keep their processes.
    """
    name = service.submit(spec)
    cuts = bool(spec.train.checkpoint.every)
    wait_until(lambda: service.get(name).step >= at and len(service.get(name).cuts) >= cuts, "cuts")
    with service.held():
        before = service.pids(name)
        for victim in victims:
            os.kill(before.pop(victim), signal.SIGKILL)
    wait_until(lambda: service.recovered(name), "it is replaced")
    after = service.pids(name)
    assert {label: after.get(label) for label in before} == before
    return service.get(name)


def test_a_stage_that_is_gone_takes_all_back_to_the_last_cut_with_their_processes(
    service: Service, unfailed: str
) -> None:
    spec = service.may_be_held("stage-killed", **{"train.checkpoint.every": "3 steps"})
    spec.retries = 1
    killed(service, spec, "stage 1 worker 0", "stage 1 worker 1")
    status = service.end("stage-killed")
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert recovery.back
    assert recovery.step % 3 == 0
    assert 8 <= recovery.reached < SHAPE.steps
    assert 0 < recovery.step <= recovery.reached, "a cut may be on its way when workers die"
    assert 0 < recovery.lost_s < 60
    steps = [cut.step for cut in status.cuts]
    assert steps == sorted(set(steps)), "each of them once"
    assert len(steps) == 3
    assert service.digest("stage-killed") == unfailed


@pytest.fixture(scope="module")
def split(service: Service) -> str:
    """The digest of a job whose experts are split over the workers of its first stage."""
    name = service.submit(split_job(service, "split"))
    status = service.end(name)
    assert status.end_reason == END_SUCCEEDED, status.reason
    assert "experts of tower.layer.4 are split over 2 workers" in logged(service, name)
    return service.digest(name)


def split_job(service: Service, name: str, every: str = "3 steps") -> JobSpec:
    mixed = {"model.entry": "fault.py:mixed", "train.split_experts": True}
    cuts = {"train.checkpoint.every": every} if every else {}
    spec = service.may_be_held(name, **mixed, **cuts)
    spec.retries = 1
    return spec


@pytest.mark.parametrize(
    ("every", "victims"),
    [
        ("3 steps", ("stage 0 worker 1",)),
        *(
            pytest.param(every, victims, marks=pytest.mark.exhaustive)
            for every, victims in (
                ("3 steps", ("stage 0 worker 0",)),
                ("3 steps", ("stage 1 worker 0",)),
                ("3 steps", ("stage 0 worker 0", "stage 0 worker 1")),
                ("", ("stage 0 worker 0",)),
            )
        ),
    ],
)
def test_with_split_experts_all_go_back_with_their_processes(
    service: Service, split: str, every: str, victims: tuple[str, ...]
) -> None:
    name = "-".join(("split", every, *victims)).replace(" ", "")
    killed(service, split_job(service, name, every), *victims)
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert recovery.back
    assert recovery.step % 3 == 0
    assert bool(recovery.step) == bool(every)
    assert service.digest(name) == split


@pytest.mark.parametrize("every", ["3 steps", pytest.param("", marks=pytest.mark.exhaustive)])
def test_a_shard_that_is_lost_takes_all_back_with_their_processes(
    service: Service, unfailed: str, every: str
) -> None:
    """Its node lives, and does not start it again without its rows."""
    name = f"shard-killed-{every[:1] or 'never'}"
    cuts = {"train.checkpoint.every": every} if every else {}
    spec = service.may_be_held(name, **{"servers.durability": "none"}, **cuts)
    spec.retries = 1
    killed(service, spec, "shard 1")
    assert "shard 1, generation 1" in service.pids(name)
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert (list(recovery.lost), recovery.back) == (["shard 1"], True)
    assert (0 < recovery.step <= recovery.reached) if every else recovery.step == 0
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
@pytest.mark.parametrize("every", ["4 steps", ""])
@pytest.mark.parametrize("stage", [0, 1])
def test_the_only_worker_of_a_stage(service: Service, stage: int, every: str) -> None:
    name = f"alone-{stage}-{every[:1] or 'never'}"
    whole = f"{name}-unfailed"
    assert service.end(service.submit(service.job(whole, **ALONE))).end_reason == END_SUCCEEDED
    spec = service.may_be_held(
        name, **ALONE, **({"train.checkpoint.every": every} if every else {})
    )
    spec.retries = 1
    killed(service, spec, f"stage {stage} worker 0", at=9)
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    recovery = status.recoveries[0]
    assert recovery.back
    assert recovery.step % 4 == 0
    assert (0 < recovery.step <= recovery.reached) if every else recovery.step == 0
    assert service.digest(name) == service.digest(whole)
    assert service.losses(name) == service.losses(whole)


@pytest.mark.parametrize("stage", [1, *more(0)])
def test_the_node_of_a_stages_only_worker_dies_and_the_kernel_tells_of_it(
    service: Service, stage: int
) -> None:
    """Nobody is left on it who could, and its lease tells seconds later."""
    spec = service.may_be_held(f"node-{stage}", **ALONE, **{"train.checkpoint.every": "4 steps"})
    spec.retries = 1
    name = service.submit(spec)
    wait_until(lambda: service.get(name).step >= 9, "it trains", pause_s=0.01)
    kind, units = (("front", 1), ("back", 2))[stage]
    if kind == "back":
        service.add_node(kind, units)
    node, pids = service.home(name, f"stage {stage} worker 0"), service.pids(name)
    with service.held():
        for pid in (node.pid, pids[f"stage {stage} worker 0"]):
            os.kill(pid, signal.SIGKILL)
    told = re.compile(r"stage \d worker 0: gave up step .*(without leave|Broken pipe|reset)")
    wait_until(lambda: told.search(logged(service, name)), "the other is told by its connections")
    service.add_node(kind, units)
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    assert status.recoveries[0].back
    wait_until(lambda: node not in service.nodes(kind), "its lease is over")
    whole = service.submit(service.job(f"{name}-unfailed", **ALONE))
    assert service.end(whole).end_reason == END_SUCCEEDED
    assert service.digest(name) == service.digest(whole)


@pytest.mark.exhaustive
@pytest.mark.parametrize("stage", [0, 1])
def test_the_only_worker_of_a_stage_that_stands_still_for_good(
    service: Service, stage: int
) -> None:
    """Its connections live and it owes no sum: its reports are missed."""
    spec = service.may_be_held(f"still-{stage}", **ALONE, **{"train.checkpoint.every": "4 steps"})
    spec.retries = 1
    name = service.submit(spec)
    wait_until(lambda: service.get(name).step >= 9, "it trains", pause_s=0.01)
    os.kill(service.pids(name)[f"stage {stage} worker 0"], signal.SIGSTOP)
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert recovery.back
    assert list(recovery.lost) == [f"stage {stage} worker 0"]
    whole = service.submit(service.job(f"{name}-unfailed", **ALONE))
    assert service.end(whole).end_reason == END_SUCCEEDED
    assert service.digest(name) == service.digest(whole)


@pytest.mark.exhaustive
def test_back_again_and_again(service: Service, unfailed: str) -> None:
    spec = service.job("back-again", **{"train.checkpoint.every": "5 steps"})
    spec.retries = 4
    name = service.submit(spec)
    for count, (at, stage) in enumerate(((7, 1), (9, 0), (12, 1), (13, 0)), 1):
        wait_until(lambda at=at: service.get(name).step >= at, "it trains", pause_s=0.01)
        pids = {label.partition(",")[0]: pid for label, pid in service.pids(name).items()}
        for rank in range(2):
            os.kill(pids[f"stage {stage} worker {rank}"], signal.SIGKILL)
        wait_until(
            lambda count=count: len(service.recovered(name)) >= count,
            "it is replaced",
            pause_s=0.001,
        )
    status = service.end(name)
    assert (status.end_reason, status.attempt, len(status.recoveries)) == (END_SUCCEEDED, 1, 4)
    assert all(one.back for one in status.recoveries)
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_a_damaged_cut_gives_way_to_the_one_before(service: Service, unfailed: str) -> None:
    spec = service.job("damaged", **{"train.checkpoint.every": "3 steps"})
    spec.retries = 1
    name = service.submit(spec)
    wait_until(lambda: len(service.get(name).cuts) > 1 and service.get(name).step >= 8, "it trains")
    pids = service.pids(name)
    for label in pids:
        if label.startswith("stage"):
            os.kill(pids[label], signal.SIGSTOP)
    newest = service.get(name).cuts[-1]
    path = Path(newest.place) / "cut.json"
    path.write_bytes(path.read_bytes()[:-40])
    for rank in range(2):
        os.kill(pids[f"stage 1 worker {rank}"], signal.SIGKILL)
    for label in pids:
        if label.startswith("stage 0"):
            os.kill(pids[label], signal.SIGCONT)
    status = service.end(name)
    assert (status.end_reason, status.step) == (END_SUCCEEDED, SHAPE.steps), status.reason
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
def test_with_staleness_no_step_is_lost(service: Service) -> None:
    losses = []
    for name in ("stale", "stale-killed"):
        spec = service.job(name, **{"train.staleness": 1})
        spec.retries = 1
        service.submit(spec)
        if name == "stale-killed":
            wait_until(lambda: service.get("stale-killed").step >= 4, "it trains")
            os.kill(service.pids(name)["stage 0 worker 0"], signal.SIGKILL)
        status = service.end(name)
        assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
        losses.append(service.losses(name))
    # The steps that were under way see rows that are fresher by a step.
    np.testing.assert_allclose(losses[1], losses[0], atol=0.02)


def test_a_job_moves_to_other_workers_and_comes_to_the_same_bits(
    service: Service, unfailed: str
) -> None:
    """All units that it may have are its own: the others begin beside those that train."""
    service.submit(service.may_be_held("moved"))
    trains(service, "moved", 4)
    before = service.pids("moved")
    status = move(service, "moved", plan(service, "moved"))
    (one,) = status.moves
    assert not one.failed, one.failed
    assert (one.reason, one.before, one.after) == ("asked", "2 front + 2 back", "2 front + 2 back")
    assert one.seconds < 60
    with service.held():
        wait_until(lambda: len(service.pids("moved")) == len(before), "those before are stopped")
        after = service.pids("moved")
        assert used(service) == {"cpu": 1, "front": 2, "back": 2}
    kept = set(before.values()) & set(after.values())
    assert kept == {pid for label, pid in before.items() if label.startswith("shard")}
    status = service.end("moved")
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    assert 4 < one.step < SHAPE.steps
    assert service.digest("moved") == unfailed
    found = plan(service, "moved")
    model = json.loads((service.directory / "out" / "moved" / "model.json").read_text())
    assert found.measured.seconds == pytest.approx(model["train_seconds"])
    assert 0 < found.measured.throughput_s < found.measured.seconds, "before it moved, too"
    assert found.measured.cost == pytest.approx(
        found.price_per_hour * found.measured.seconds / 3600
    )
    first, second = service.plans("moved")
    assert (first.reason, first.from_step) == ("planned", 0)
    assert (second.reason, second.from_step) == ("asked", one.step)
    assert first.measured == pytest.approx(one.measured)
    assert second.measured == pytest.approx(found.measured.throughput)
    assert "the tables hold just the cut" in logged(service, "moved")
    assert not status.cuts, "it was to take none"
    assert not (service.directory / "out" / "moved.cuts").exists()


def test_each_time_takes_one_of_the_jobs_retries(service: Service) -> None:
    name = "not-forgiven"
    service.submit(service.job(name))
    wait_until(lambda: service.get(name).step >= 2, "it trains")
    os.kill(service.pids(name)["stage 1 worker 0"], signal.SIGKILL)
    status = service.end(name)
    assert (status.state, status.end_reason) == (FAILED, END_WORKER_CRASHED)
    assert status.process == "stage 1 worker 0"


def test_a_node_that_drains_is_left_for_none_of_the_retries_and_ends_by_itself(
    service: Service, unfailed: str
) -> None:
    name = "drained"
    service.submit(service.may_be_held(name))
    wait_until(lambda: service.get(name).step >= 4, "it trains")
    with service.held():  # however long it takes to start another worker
        before = service.pids(name)
        leaving = "stage 0 worker 0"
        node = service.home(name, leaving)
        os.kill(node.pid, signal.SIGTERM)
        wait_until(lambda: service.recovered(name), "its worker is replaced")
        after = service.pids(name)
    del before[leaving]
    assert {label: after.get(label) for label in before} == before
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert (list(recovery.lost), recovery.drained) == ([leaving], True)
    assert service.digest(name) == unfailed
    assert node.process.wait(30) == 0
    service.add_node("front", 1)


def test_a_job_trains_until_who_is_to_replace_its_workers_listens(service: Service) -> None:
    late = {"model.entry": "fault.py:late", "model.args.file": str(service.hold)}
    name = service.submit(service.job("drained-late", **late, **{"train.max_steps": 5000}))
    trains(service, name, 4)
    wait_until(lambda: len(service.nodes("front")) == 3, "one is free")
    node = service.home(name, "stage 0 worker 0")
    with service.held():
        os.kill(node.pid, signal.SIGTERM)
        wait_until(lambda: any("generation" in label for label in service.pids(name)), "it starts")
        trains(service, name, service.get(name).step + 20)
        assert "stage 0 worker 0" in service.pids(name)
        assert not service.recovered(name)
    wait_until(lambda: service.recovered(name), "it is replaced")
    assert not service.get(name).moves
    service.stub.CancelJob(JobRequest(job_id=name), timeout=60)
    assert node.process.wait(30) == 0
    service.add_node("front", 1)


@pytest.mark.exhaustive
def test_who_is_to_replace_workers_dies_and_they_move(service: Service) -> None:
    dies = {"model.entry": "fault.py:first_dies", "train.max_steps": 5000}
    name = service.submit(service.job("drained-in-vain", **dies))
    trains(service, name, 4)
    wait_until(lambda: len(service.nodes("front")) == 3, "one is free")
    node = service.home(name, "stage 0 worker 0")
    os.kill(node.pid, signal.SIGTERM)
    wait_until(lambda: service.get(name).moves, "it moves")
    status = service.get(name)
    assert (status.attempt, [move.failed for move in status.moves]) == (1, [""])
    assert not status.recoveries
    service.stub.CancelJob(JobRequest(job_id=name), timeout=60)
    assert node.process.wait(30) == 0
    service.add_node("front", 1)


@pytest.mark.exhaustive
def test_nodes_that_drain_one_after_the_other_are_left_alike(service: Service) -> None:
    name = service.submit(service.job("drained-twice", **{"train.max_steps": 5000}))
    trains(service, name, 4)
    for count, leaving in enumerate(("stage 0 worker 0", "stage 0 worker 1"), 1):
        wait_until(lambda: len(service.nodes("front")) == 3, "one is free")
        node = service.home(name, leaving)
        os.kill(node.pid, signal.SIGTERM)
        wait_until(
            lambda: len(service.recovered(name)) >= count or service.get(name).moves,  # noqa: B023
            "it is left",
        )
        assert not service.get(name).moves
        assert node.process.wait(30) == 0
        service.add_node("front", 1)
    service.stub.CancelJob(JobRequest(job_id=name), timeout=60)


@pytest.mark.exhaustive
def test_with_split_experts_a_node_that_drains_is_left_with_nothing_lost(
    service: Service, split: str
) -> None:
    name = "drained-split"
    service.submit(split_job(service, name, every=""))
    trains(service, name, 4)
    wait_until(lambda: len(service.nodes("front")) == 3, "one is free")
    node = service.home(name, "stage 0 worker 0")
    with service.held():  # until they are to pause
        os.kill(node.pid, signal.SIGTERM)
        wait_until(lambda: service.recovered(name), "its worker is replaced")
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert recovery.drained
    assert recovery.back
    assert recovery.reached == recovery.step >= 4, "no step is done twice"
    assert service.digest(name) == split
    assert node.process.wait(30) == 0
    service.add_node("front", 1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("room", [True, False])
def test_a_node_with_a_whole_stage_is_left_with_nothing_lost(
    service: Service, unfailed: str, room: bool
) -> None:
    name = f"drained-{'room' if room else 'full'}"
    if room:
        service.add_node("back", 2)
    service.submit(service.may_be_held(name))
    trains(service, name, 4)
    node = service.home(name, "stage 1 worker 0")
    with service.held():  # until the workers elsewhere listen, or there is no room for them
        os.kill(node.pid, signal.SIGTERM)
        if room:
            wait_until(lambda: service.get(name).moves, "it moves", 120)
        else:
            wait_until(lambda: service.get(name).attempts, "it waits for another node", 120)
    if not room:
        assert node.process.wait(30) == 0
        service.add_node("back", 2)
    status = service.end(name)
    assert (status.end_reason, status.step) == (END_SUCCEEDED, SHAPE.steps), status.reason
    if room:
        (move,) = status.moves
        assert (move.reason, move.failed) == ("drained", "")
        assert node.process.wait(30) == 0
    else:
        (went,) = status.attempts
        assert went.drained
        assert status.from_step >= went.step >= 4, "no step is done twice"
    assert service.digest(name) == unfailed


@pytest.mark.exhaustive
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_loss_of_whole_batches_is_the_same_whoever_dies_meanwhile(
    service: Service, staleness: int
) -> None:
    whole = {"train.loss": "pairwise", "train.staleness": staleness, "train.max_steps": 60}
    name, unfailed = f"compared-{staleness}", f"compared-unfailed-{staleness}"
    assert service.end(service.submit(service.job(unfailed, **whole))).end_reason == END_SUCCEEDED
    spec = service.may_be_held(name, **whole)
    spec.retries = 2
    service.submit(spec)
    for count, victim in enumerate(("stage 1 worker 0", "stage 0 worker 1"), 1):
        trains(service, name, 6 * count)
        with service.held():
            os.kill(service.pids(name)[victim], signal.SIGKILL)
        wait_until(lambda: len(service.recovered(name)) >= count, "it is replaced")  # noqa: B023
    trains(service, name, 18)
    moved = move(service, name, plan(service, name, (0, 2, "front", 1), (3, 3, "back", 2)))
    assert not moved.moves[-1].failed, moved.moves[-1].failed
    status = service.end(name)
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    assert service.losses(name, 60) == pytest.approx(service.losses(unfailed, 60), rel=1e-5)
