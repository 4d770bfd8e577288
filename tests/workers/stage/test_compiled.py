"""Layers that a model of the job's own has torch compile: trained as those that it does not."""

import numpy as np
import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from tests.workers.stage.in_process import Pipeline
from tests.workers.stage.test_equality import KEYS, job_of
from workers.data.columns.arrays import Batch
from workers.embedding.sparse import SparseEmbedding
from workers.model.chain.compiled import compile_layers
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import ModelError


class Block(nn.Module):
    def __init__(self, drop):
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(6, 6), nn.LayerNorm(6), nn.Dropout(drop)

    def forward(self, x):
        return self.drop(nn.functional.gelu(self.norm(self.inner(x)))) + x


class Net(nn.Module):
    def __init__(self, drop, backend):
        super().__init__()
        self.rows = SparseEmbedding("one", 3, optimizer="adagrad", learning_rate=0.05, scale=1.0)
        self.first, self.second, self.top = Block(drop), Block(drop), nn.Linear(6, 1)
        if backend is not None:
            for layer in (self.first, self.second):
                layer.compile(backend=backend, dynamic=True)

    def forward(self, sparse):
        return self.top(self.second(self.first(self.rows(sparse).flatten(1))))


def train(cuts, widths, drop, backend=None, staleness=0):
    """Losses, dense weights and rows of a plan."""
    torch._dynamo.reset()
    generator = np.random.default_rng(0)
    sizes = (13, 17, 40, 9, 22, 4, 28, 33)  # so micro-batches of 1 to 10 samples
    steps = [
        Batch(
            {
                "sparse": generator.integers(0, KEYS, (size, 2)),
                "label.label": generator.integers(0, 2, size).astype(np.float32),
            }
        )
        for size in sizes
    ]

    def build():
        torch.manual_seed(7)
        return Net(drop, backend)

    pipeline = Pipeline(job_of("adam", staleness), build, cuts, widths, steps, 4)
    workers = pipeline.run()
    state = {n: v for some in workers for n, v in some[0].module.state_dict().items()}
    rows = pipeline.client.tables["3.job.one"].pull(np.arange(KEYS, dtype=np.uint64), True)
    return workers[-1][0].executor.progress.losses, state, torch.from_numpy(rows)


def assert_same(found, expected, tolerance):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    for name, value in expected[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(found[2], expected[2], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("cuts", "widths", "drop", "staleness"),
    [
        ((3,), (1,), 0.2, 0),
        ((3,), (1,), 0.2, 1),
        ((1, 3), (2, 1), 0.0, 1),  # of threads, who would draw from one generator
    ],
)
def test_compiled_layers_train_as_others(cuts, widths, drop, staleness):
    counted = CompileCounterWithBackend("aot_eager")
    expected = train(cuts, widths, drop, staleness=staleness)
    found = train(cuts, widths, drop, counted, staleness)
    assert 0 < counted.frame_count <= 8 * sum(widths), "compiled anew for each size"
    assert_same(found, expected, 2e-5)


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows = SparseEmbedding("one", 3)
        self.blocks = nn.ModuleList([Block(0.0), Block(0.0)])
        self.top = nn.Linear(6, 1)

    def forward(self, sparse):
        x = self.rows(sparse).flatten(1)
        for block in self.blocks:
            x = block(x)
        return self.top(self.blocks[0](x))


def compiled(model):
    return {n for n, m in model.named_modules() if m._compiled_call_impl is not None}


def test_a_job_has_layers_compiled_by_patterns_of_their_names():
    traced = TracedModel(Pair())
    names = set(traced.model.state_dict())
    compile_layers(traced, [])
    assert not compiled(traced.model)
    compile_layers(traced, ["blocks.*", "top"])
    assert compiled(traced.model) == {"blocks.0", "blocks.1", "top"}
    assert set(traced.model.state_dict()) == names


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("block.*", r"no layer is named 'block\.\*'; there are blocks\.0, blocks\.1, rows, top"),
        ("blocks.0.norm", "no layer is named"),
        ("*", "'rows', of '\\*', looks up rows"),
    ],
)
def test_patterns_that_are_of_no_layer_or_of_rows_are_refused(pattern, expected):
    with pytest.raises(ModelError, match=expected):
        compile_layers(TracedModel(Pair()), [pattern])
