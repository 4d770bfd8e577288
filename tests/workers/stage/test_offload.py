"""A job with its experts out of memory has the bits of the same job with them in it."""

from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from protos.job_pb2 import JobSpec
from tests.workers.stage.in_process import TABLES
from tests.workers.stage.test_equality import KEYS, cases, wide
from workers.moe.layer import MoE
from workers.offload.policy import POLICIES
from workers.stage.offloading import outside_of
from workers.stage.state import capture

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


def trained(case, after=lambda worker: None, **how):
    """Of each worker weights and what its optimizer keeps, then rows, losses, and what was said."""
    states = {}

    def look(worker):
        place, parts = worker.place, worker.parts
        state = capture(
            parts.graph, parts.group, worker.update, len(case.sizes), everywhere=True
        )
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
    workers = pipeline.run()
    tables = pipeline.client.tables
    rows = {name: tables[TABLES + name].pull(np.arange(KEYS, dtype=np.uint64), True) for name in ("one", "two")}
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


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
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
