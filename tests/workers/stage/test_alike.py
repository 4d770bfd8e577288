"""What no seed of the job fixes: buffers that each worker makes, draws for held-out samples."""

import numpy as np
import pytest
import torch
from torch import nn

from tests.workers.stage.in_process import Pipeline
from tests.workers.stage.test_objectives import FEATURES, batches, job_of
from workers.model.code.entry import ModelError
from workers.model.objective.metrics import JobMetrics
from workers.stage.running import evaluation


class Features(nn.Module):
    """Random ones, of a matrix that stays."""

    def __init__(self, generator):
        super().__init__()
        matrix = generator.normal(size=(FEATURES, 4)).astype(np.float32)
        self.register_buffer("matrix", torch.from_numpy(matrix))

    def forward(self, x):
        return (x @ self.matrix).cos()


class Net(nn.Module):
    def __init__(self, first):
        super().__init__()
        self.first, self.top = first, nn.Linear(4, 1)

    def forward(self, dense):
        y = self.top(self.first(dense))
        return {"click": y, "delay": y.squeeze(1), "kind": y.expand(-1, 3)}


def test_buffers_that_each_worker_makes_anew_are_refused():
    def build():
        return Net(Features(np.random.default_rng()))

    Pipeline(job_of(), build, [0, 1], [1, 2], batches(), 2).run()  # of one worker it is its own
    with pytest.raises(
        ModelError, match=r"'first\.matrix': each of the stage's 2 workers has made"
    ):
        Pipeline(job_of(), build, [1], [2], batches(), 2).run()


def test_buffers_that_follow_from_a_seed_are_taken():
    def build():
        return Net(Features(np.random.default_rng(0)))

    Pipeline(job_of(), build, [1], [2], batches(), 2).run()


class Sampled(nn.Linear):
    """Draws in evaluation, too."""

    def forward(self, x):
        return nn.functional.gumbel_softmax(super().forward(x))


def test_what_is_drawn_for_held_out_samples_depends_on_their_batch_alone(monkeypatch):
    """And not on what a worker has drawn before, by which validation would depend on the plan."""
    job, found = job_of(micro_batches=2), []
    (samples,) = batches((23,))

    def given(job, split, size, rank, workers, stopped):
        for number in range(6):
            part = samples.slice(4 * number, 4 * number + 4).arrays
            tensors = {name: torch.from_numpy(array) for name, array in part.items()}
            yield number, {**tensors, "label.kind": tensors["label.kind"].long()}

    def between(worker):
        for seed, split in enumerate(("valid", "test")):
            torch.manual_seed(seed)
            measured = worker.executor.evaluate(split)
            found.append(JobMetrics(job).measure(measured.found, "of"))
        worker.executor.drain()

    monkeypatch.setattr(evaluation, "evaluation_batches", given)
    Pipeline(job, lambda: Net(Sampled(FEATURES, 4)), [1], [1], batches(), 2, between=between).run()
    assert found[0] == found[1]
