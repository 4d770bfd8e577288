"""Jobs whose experts lie out of memory: whoever is killed, the result is that of all in memory."""

import os
import signal
from pathlib import Path

import pytest

from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import END_SUCCEEDED
from tests.scheduler.runs.survivors import SHAPE, Service, logged, trains
from tests.waiting import wait_until

pytest.importorskip("workers.stage")

MEMORY = "6000"  # bytes: one of the four experts, and what updates it
# A worker that is killed when half of an expert is written.
TORN = """
import os
import signal

import fault
import torch
from workers.offload.experts.layout import view_of
from workers.offload.experts.packed import aligned
from workers.offload.experts.trained import TrainedExperts

own = TrainedExperts.native_write
written, doomed = [], []


def torn(self, layer, expert, extent):
    written.append(expert)
    if doomed and len(written) == 40:
        half = aligned(len(extent))  # as a file needs it that is written past the page cache
        whole = torch.frombuffer(extent, dtype=torch.uint8)
        half.zero_()[: len(half) // 2] = whole[: len(half) // 2]
        os.pwrite(self._file, view_of(half), self.layers[layer].at(expert))
        os.kill(os.getpid(), signal.SIGKILL)
    return own(self, layer, expert, extent)


TrainedExperts.native_write = torn


def build(file, **arguments):
    launch = fault.launched()
    if launch is not None and not launch.generation and (launch.index, launch.rank) == (0, 1):
        doomed.append(True)
    return fault.mixed(file, **arguments)
"""

# A worker of the stage behind is killed while it waits for the verdict, or one of the experts' own
# stage between its part of a step's rows and their commit: as in `fault`, with experts. Or one of
# the experts' stage never hears a verdict that others have, until a death calls it away.
DOUBT = """
import os
import signal
import time

import fault
import torch
from workers.stage.update.ending import Ending

wait = Ending._wait_for_verdict


def unheard(self, step):
    place = self._place.stage, self._place.rank
    doomed = step == 6 and self._notices._generation == 0
    if doomed and place == (0, 1):
        self._wait_for_others(lambda: False)
    notice = wait(self, step)
    if doomed and place == (1, 0):
        time.sleep(0.5)  # the first of all takes the step
        os.kill(os.getpid(), signal.SIGKILL)
    return notice


def build(when, rank, file, **arguments):
    with torch.random.fork_rng():
        if when == "unheard":
            Ending._wait_for_verdict = unheard
        elif when:
            fault.build(when, rank, **arguments)
        else:
            fault.unjudged(rank, **arguments)
    return fault.mixed(file, **arguments)
"""


def job(service: Service, name: str, **overrides: object) -> JobSpec:
    mixed = {"model.entry": "fault.py:mixed", "train.staleness": 0}
    spec = service.may_be_held(name, **(mixed | overrides))
    spec.retries = 1
    return spec


def offloaded(service: Service, name: str, **overrides: object) -> JobSpec:
    return job(service, name, **({"train.offload.memory": MEMORY} | overrides))


@pytest.fixture(scope="module")
def resident(service: Service) -> str:
    """The digest of the job with its experts in memory."""
    status = service.end(service.submit(job(service, "resident")))
    assert status.end_reason == END_SUCCEEDED, status.reason
    return service.digest("resident")


def test_it_has_the_bits_of_the_job_with_experts_in_memory(
    service: Service, resident: str, tmp_path: Path
) -> None:
    """Two workers have the stage, each its own file, which is gone when the job is."""
    spec = offloaded(service, "out", **{"train.offload.path": str(tmp_path / "disk")})
    status = service.end(service.submit(spec))
    assert status.end_reason == END_SUCCEEDED, status.reason
    said = f"4 experts of tower.layer.4 lie in {tmp_path}/disk, 1 of them in memory"
    assert logged(service, "out").count(said) == 2
    assert service.digest("out") == resident
    assert not [*(tmp_path / "disk").iterdir()]


@pytest.mark.exhaustive
@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_is_replaced_has_its_experts_of_the_other(
    service: Service, resident: str, rank: int
) -> None:
    name = f"out-killed-{rank}"
    service.submit(offloaded(service, name))
    trains(service, name, 4)
    os.kill(service.pids(name)[f"stage 0 worker {rank}"], signal.SIGKILL)
    wait_until(lambda: service.recovered(name), "it is replaced")
    status = service.end(name)
    assert (status.end_reason, status.attempt, status.step) == (END_SUCCEEDED, 1, SHAPE.steps)
    (recovery,) = status.recoveries
    assert not recovery.back
    assert service.digest(name) == resident


@pytest.mark.exhaustive
def test_a_stage_that_is_gone_goes_back_to_a_cut_with_its_experts(
    service: Service, resident: str
) -> None:
    name = "out-gone"
    service.submit(offloaded(service, name, **{"train.checkpoint.every": "3 steps"}))
    wait_until(lambda: service.get(name).step >= 8 and service.get(name).cuts, "it takes cuts")
    with service.held():
        pids = service.pids(name)
        for worker in ("stage 0 worker 0", "stage 0 worker 1"):
            os.kill(pids[worker], signal.SIGKILL)
    wait_until(lambda: service.recovered(name), "they are replaced")
    status = service.end(name)
    assert (status.end_reason, status.step) == (END_SUCCEEDED, SHAPE.steps), status.reason
    recovery = status.recoveries[0]
    assert recovery.back
    assert recovery.step > 0
    assert service.digest(name) == resident


@pytest.mark.exhaustive
def test_a_worker_that_is_killed_while_it_writes_an_expert_leaves_nothing_behind(
    service: Service, resident: str
) -> None:
    (service.directory / "torn.py").write_text(TORN)
    with (service.directory / ".heterpsignore").open("a") as file:
        file.write("!torn.py\n")
    spec = offloaded(service, "out-torn", **{"model.entry": "torn.py:build"})
    status = service.end(service.submit(spec))
    assert (status.end_reason, status.step) == (END_SUCCEEDED, SHAPE.steps), status.reason
    assert len(status.recoveries) == 1
    assert service.digest("out-torn") == resident


@pytest.mark.parametrize(
    ("when", "rank"),
    [
        pytest.param("unheard", 0, marks=pytest.mark.exhaustive),
        ("after it is staged", 1),
        pytest.param("", 0, marks=pytest.mark.exhaustive),
        pytest.param("", 1, marks=pytest.mark.exhaustive),
        pytest.param("before they are committed", 0, marks=pytest.mark.exhaustive),
        pytest.param("after they are committed", 0, marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_in_doubt_is_made_by_experts_once_or_never(
    service: Service, resident: str, when: str, rank: int
) -> None:
    """Its gradients are in the experts' extents already when the verdict is lost on the way."""
    (service.directory / "doubt.py").write_text(DOUBT)
    with (service.directory / ".heterpsignore").open("a") as file:
        file.write("!doubt.py\n")
    name = f"out-{when.replace(' ', '-') or 'unjudged'}-{rank}"
    arguments = {"model.args.when": when, "model.args.rank": rank}
    spec = offloaded(service, name, **{"model.entry": "doubt.py:build"}, **arguments)
    status = service.end(service.submit(spec))
    assert (status.end_reason, status.attempt) == (END_SUCCEEDED, 1), status.reason
    (recovery,) = status.recoveries
    assert not recovery.back
    assert recovery.step == 7 if when == "unheard" else recovery.step in (6, 7)
    assert list(recovery.lost) == [f"stage {int(when in ('', 'unheard'))} worker {rank}"]
    assert service.digest(name) == resident
