"""A job with its experts out of memory has the bits of the same job with them in it."""

import errno
import os
import weakref
from dataclasses import replace
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.job_pb2 import JobSpec
from tests.workers.stage.cuts.test_validation import STEPS, held_out, validated
from tests.workers.stage.in_process import TABLES
from tests.workers.stage.test_equality import KEYS, cases, wide
from workers.learning.precision import LossScale, Precision
from workers.moe.layer import MoE
from workers.offload.engine import _reads
from workers.offload.experts.layout import ExpertFileError, view_of
from workers.offload.experts.packed import aligned
from workers.offload.experts.trained import TrainedExperts
from workers.offload.slots.policy import POLICIES
from workers.offload.training import gathered
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.kept import of_chunks, to_chunks
from workers.stage.cuts.state import StageState, capture
from workers.stage.experts.outside import folder_of, outside_of

assert held_out  # a fixture
PAGE = 4096  # bytes of an expert as small as these


def offloaded(case, folder, slots=1, **spec):
    """The same case with its experts out of memory."""
    job = JobSpec()
    job.CopyFrom(case.job)
    job.train.offload.memory = str(slots * PAGE + 1000)
    job.train.offload.path = str(folder)
    for key, value in spec.items():
        setattr(job.train.offload, key, value)
    return replace(case, job=job)


def trained(case, after=lambda worker: None, batches=None, **how):
    """Of each worker weights and what its optimizer keeps, then rows, losses, and what was said."""
    states = {}

    def look(worker):
        place, parts = worker.place, worker.parts
        state = capture(parts.graph, parts.group, worker.update, len(case.sizes), everywhere=True)
        states[place.stage, place.rank] = {
            **{name: value.clone() for name, value in state.weights.items()},
            **{
                f"{key} of {name}": value.clone()
                for name, kept in state.optimizer.items()
                for key, value in kept.items()
            },
        }
        after(worker)

    pipeline = case.pipeline(between=look, **how)
    if batches is not None:
        pipeline._batches.steps = batches
    workers = pipeline.run()
    tables = pipeline.client.tables
    rows = {
        name: tables[TABLES + name].pull(np.arange(KEYS, dtype=np.uint64), True)
        for name in ("one", "two")
    }
    said = [worker.diverged for worker in chain(*workers)]
    return states, rows, workers[-1][0].executor.progress.losses, said


def require_equal(found, expected):
    assert found[0].keys() == expected[0].keys()
    for worker, state in expected[0].items():
        assert found[0][worker].keys() == state.keys()
        for name, value in state.items():
            ours = found[0][worker][name]
            assert ours.dtype == value.dtype, name
            assert ours.numpy().tobytes() == value.numpy().tobytes(), (worker, name)
    for name, rows in expected[1].items():
        assert found[1][name].tobytes() == rows.tobytes(), name
    assert found[2:] == expected[2:]


@st.composite
def mixtures(draw):
    case = draw(cases())
    case.job.train.staleness = 0
    case.job.train.precision = draw(st.sampled_from(("fp32", "fp32", "bf16", "fp16")))
    return replace(case, experts=draw(st.integers(3, 6)))


@settings(max_examples=10, suppress_health_check=list(HealthCheck))
@given(mixtures(), st.integers(1, 7), st.sampled_from(sorted(POLICIES)), st.integers(1, 3))
def test_any_plan_trains_as_with_experts_in_memory(tmp_path_factory, case, slots, policy, readers):
    folder = tmp_path_factory.mktemp("experts")
    slots_of = []

    def look(worker):
        outside = outside_of(worker.module)
        assert (outside is not None) == any(isinstance(m, MoE) for m in worker.module.modules())
        slots_of.extend([outside.slots] if outside is not None else [])

    expected = trained(case)
    found = trained(offloaded(case, folder, slots, policy=policy, readers=readers), look)
    require_equal(found, expected)
    assert slots_of
    assert {*slots_of} == {min(slots, case.experts)}
    assert not [*folder.iterdir()]


@settings(max_examples=3, suppress_health_check=list(HealthCheck))
@given(mixtures(), cases(), st.integers(0, 100), st.booleans(), st.booleans())
def test_any_cut_goes_on_with_and_without(tmp_path_factory, case, other, which, before, after):
    """Taken with experts out of memory or in it, and gone on from either way, by any plan."""
    folder = tmp_path_factory.mktemp("cuts")
    case.job.train.checkpoint.every = "1 steps"
    case.job.train.checkpoint.keep = 1000
    expected = trained(case)
    took = offloaded(case, folder) if before else case
    places = []

    def look(worker):
        if worker.parts.cuts is not None and worker.place.stage == worker.place.rank == 0:
            worker.parts.cuts.finish()
            places.extend(cut.place for cut in worker.executor.progress.cuts.cuts)
            assert not worker.executor.progress.cuts.failed

    require_equal(trained(took, look, folder=folder / "cuts"), expected)
    place = places[which % len(places)]
    goes_on = offloaded(case, folder, 2) if after else case
    found = trained(goes_on, resume=place, attempt=2)
    require_equal(found, expected)
    moved = replace(goes_on, cuts=other.cuts, widths=other.widths)
    in_memory = replace(case, cuts=other.cuts, widths=other.widths)
    require_equal(
        trained(moved, resume=place, attempt=2), trained(in_memory, resume=place, attempt=2)
    )


def two(**train):
    """Stages of two workers, the mixture in the first of them."""
    return replace(wide(cuts=(2, 4), widths=(2, 1), **train), sizes=(13,) * 8, experts=5)


@pytest.mark.parametrize("clip", [0.0, 0.05])
def test_steps_that_are_skipped_change_nothing(tmp_path, monkeypatch, clip):
    """In fp16 the loss scale is too large at first: gradients of experts are not finite."""

    def scale(precision):
        return LossScale(2.0**26, interval=2)

    monkeypatch.setattr(Precision, "loss_scale", scale)
    case, applied = two(precision="fp16", clip=clip), set()

    def look(worker):
        applied.add(worker.executor._ending.applied)

    expected = trained(case)
    require_equal(trained(offloaded(case, tmp_path), look), expected)
    (steps,) = applied
    assert 0 < steps < len(case.sizes)


def test_a_training_that_diverges_leaves_experts_as_they_were(tmp_path):
    case = two(clip=0.05)
    batches = case.batches()
    batches[4]["label.label"][7] = np.nan
    expected = trained(case, batches=batches)
    assert all("step 4" in said for said in expected[3])
    require_equal(trained(offloaded(case, tmp_path), batches=batches), expected)
    short = trained(replace(case, sizes=case.sizes[:4]))
    require_equal((short[0], {}), (expected[0], {}))


def test_rates_that_change_are_those_of_each_step_for_experts_without_tokens(tmp_path, monkeypatch):
    """Also where so many steps were missed that they are made up for on the way."""
    monkeypatch.setattr(gathered, "_MOST_STEPS", 3)
    case = two()
    case.job.train.optimizer.schedule = "cosine"
    case.job.train.optimizer.warmup_steps = 3
    case.job.train.optimizer.weight_decay = 0.01
    case = replace(case, sizes=(2, 1) * 6)  # tokens for some of the experts alone
    require_equal(trained(offloaded(case, tmp_path)), trained(case))


def test_groups_of_parameters_have_their_own_options(tmp_path):
    case = two(clip=0.05)
    case.job.train.optimizer.groups["small.w1"].learning_rate = 0.5
    case.job.train.optimizer.groups["*w2"].weight_decay = 0.25
    require_equal(trained(offloaded(case, tmp_path)), trained(case))


@pytest.mark.usefixtures("held_out")
def test_the_best_state_is_given_back_to_experts(tmp_path):
    """After a training whose validation says that an earlier state was better."""
    case = validated(replace(two(), sizes=(13,) * STEPS), "2 steps", "valid_auc", 2)
    steps = []

    def look(worker):
        validations = worker.executor.following.validations
        steps.append((validations.best.step, worker.executor.progress.step))

    before = trained(case, look, folder=tmp_path / "before", restores=True)
    after = trained(offloaded(case, tmp_path), look, folder=tmp_path / "after", restores=True)
    require_equal(after, before)
    assert len({*steps}) == 1
    assert steps[0][0] < steps[0][1], "one that shows something"


def test_a_disk_that_fails_ends_the_training(tmp_path, monkeypatch):
    case = offloaded(two(), tmp_path)
    written = []

    def full(self, layer, expert, extent):
        written.append(expert)
        if len(written) > 9:
            return _reads.Transfer(device, False, True, 0, [extent], [None], None)
        return write(self, layer, expert, extent)

    write = TrainedExperts.native_write
    monkeypatch.setattr(TrainedExperts, "native_write", full)
    with Path("/dev/full").open("wb") as stream:
        device = stream.fileno()
        with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
            trained(case)


def test_an_expert_that_was_torn_ends_the_training(tmp_path, monkeypatch):
    case = offloaded(two(), tmp_path)
    written = []

    def torn(self, layer, expert, checksum):
        note(self, layer, expert, checksum)
        written.append(expert)
        if len(written) == 9:
            at = self.layers[layer].at(expert)
            page = aligned(PAGE)
            os.preadv(self._file, [view_of(page)], at)
            page[5] += 1
            os.pwrite(self._file, view_of(page), at)

    note = TrainedExperts.was_written
    monkeypatch.setattr(TrainedExperts, "was_written", torn)
    with pytest.raises(ExpertFileError, match="it was damaged"):
        trained(case)


def test_a_disk_without_room_is_told_before_the_first_step(tmp_path, monkeypatch):
    def full(file, offset, size):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    case = offloaded(two(), tmp_path)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="of experts are to be written there"):
        trained(case)


def test_a_state_of_another_worker_lies_on_the_disk(tmp_path):
    """It may be as large as what is out of memory; the file goes with it."""
    kept = Beginning(3, state=StageState({"experts.w1": torch.rand(5, 1000)}, {}, {}, ()))
    found = of_chunks(to_chunks(kept), tmp_path)
    (weights,) = found.state.weights.values()
    assert torch.equal(weights, kept.state.weights["experts.w1"])
    assert not [*tmp_path.iterdir()]

    def lines():
        return Path("/proc/self/maps").read_text().count(str(tmp_path))

    assert lines() == 1
    del found, weights
    assert lines() == 0


def test_what_is_closed_has_no_memory_and_is_not_used_again(tmp_path):
    case, stores = offloaded(two(), tmp_path), []

    def look(worker):
        if (outside := outside_of(worker.module)) is not None:
            stores.append((outside, weakref.ref(outside._store.memory)))

    trained(case, look)
    assert stores
    for outside, memory in stores:
        assert memory() is None
        outside.close()  # again
        for use in (outside.state, outside.weights, outside.step_alone):
            with pytest.raises(RuntimeError, match=r"was closed|broken off"):
                use()


def test_a_folder_that_cannot_be_made_names_its_key(tmp_path):
    (tmp_path / "file").touch()
    job = JobSpec()
    job.train.offload.memory, job.train.offload.path = "1MB", str(tmp_path / "file")
    with pytest.raises(OSError, match=r"train\.offload\.path: File exists; expected .*/file"):
        folder_of(job)


@pytest.mark.skipif(not os.path.ismount("/dev/shm"), reason="/dev/shm is no file system of its own")
def test_a_folder_in_memory_is_refused_as_the_jobs_own_error() -> None:
    job = JobSpec()
    job.train.offload.memory, job.train.offload.path = "1MB", "/dev/shm"
    # Not an OSError: those are of the machine, and told with where they come from.
    with pytest.raises(ValueError, match=r"train\.offload\.path: /dev/shm is tmpfs"):
        folder_of(job)
