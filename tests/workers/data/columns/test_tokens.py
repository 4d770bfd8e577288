"""Token lists: the next token is the label, unless a column is; what does not fit is named."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
from torch.nn.functional import cross_entropy

from protos.job_pb2 import DataSpec, JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.columns.arrays import labels_in
from workers.data.tensors import first_samples, tensors_of
from workers.model.objective.loss import job_loss

ROWS, WIDTH = 40, 5
OWN = """
from torch.nn import functional as f

def smoothed(outputs, batch):
    return f.cross_entropy(outputs.flatten(0, 1), batch["label"].flatten(), label_smoothing=0.1)
"""


def write(path, values, kind, **columns):
    table = pa.table({"window": pa.array(values, kind), **columns})
    pa.parquet.write_table(table, path, row_group_size=16)


@pytest.fixture
def windows():
    return np.arange(ROWS * WIDTH).reshape(ROWS, WIDTH)


def dataset(folder, **spec):
    return Dataset(DataSpec(path=".", train="*.parquet", tokens="window", **spec), "train", folder)


@pytest.mark.parametrize("kind", [pa.list_(pa.int64(), WIDTH), pa.list_(pa.uint8())])
@pytest.mark.parametrize("cache_bytes", [0, 1 << 20])
def test_what_follows_is_the_label(tmp_path, windows, kind, cache_bytes):
    write(tmp_path / "a.parquet", (windows % 256).tolist(), kind)
    spec = DataSpec(path=".", train="*.parquet", tokens="window")
    read = Dataset(spec, "train", tmp_path, cache_bytes=cache_bytes)
    read_in_steps = GlobalBatches(read, 8, seed=1)
    batches = [tensors_of(read_in_steps.read(step)) for step in range(read_in_steps.steps)]
    tokens = np.concatenate([batch["tokens"].numpy() for batch in batches])
    labels = np.concatenate([batch["label.label"].numpy() for batch in batches])
    assert tokens.dtype == labels.dtype == np.int64
    assert tokens.shape == labels.shape == (ROWS, WIDTH - 1)
    assert (tokens[:, 1:] == labels[:, :-1]).all()
    whole = np.column_stack([tokens, labels[:, -1:]])
    assert sorted(map(tuple, whole)) == sorted(map(tuple, windows % 256))


def test_a_loss_of_the_jobs_own_reads_what_follows_as_its_label(tmp_path, windows):
    write(tmp_path / "a.parquet", windows.tolist(), pa.list_(pa.int32()))
    (tmp_path / "smoothed.py").write_text(OWN)
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.tokens = ".", "a.parquet", "window"
    job.model.loss = "smoothed.py:smoothed"
    batch = tensors_of(first_samples(Dataset.of(job, "train"), ROWS))
    torch.manual_seed(0)
    logits = torch.randn(ROWS, WIDTH - 1, ROWS * WIDTH)
    (loss,) = job_loss(job).of_batch(logits, labels_in(batch)).values()
    following = torch.from_numpy(windows)[:, 1:].flatten()
    expected = cross_entropy(logits.flatten(0, 1), following, label_smoothing=0.1)
    assert (batch["tokens"].numpy() == windows[:, :-1]).all()
    assert float(loss) == pytest.approx(float(expected))


def test_a_label_column_leaves_the_tokens_whole(tmp_path, windows):
    write(tmp_path / "a.parquet", windows.tolist(), pa.list_(pa.int32()), y=[0, 1] * (ROWS // 2))
    batch = dataset(tmp_path, label="y").encoded()
    assert (batch["tokens"] == windows).all()
    assert batch["label.label"].tolist() == [0, 1] * (ROWS // 2)


@pytest.mark.parametrize(
    ("values", "kind", "said"),
    [
        ([[1, 2], [1, 2, 3]], pa.list_(pa.int64()), "got '3 tokens', expected 2, as before"),
        ([[1], [2]], pa.list_(pa.int64()), "got '1 tokens', expected 2 or more"),
        ([[1, 2], None], pa.list_(pa.int64()), "got 'no list'"),
        ([[1, 2], [1, None]], pa.list_(pa.int64()), "a missing token"),
        ([[1, 2], [-1, 2]], pa.list_(pa.int64()), "got -1, expected whole numbers from 0"),
        ([[1, 2], [2**31, 2]], pa.list_(pa.int64()), "got 2147483648"),
        ([[1.5, 2]], pa.list_(pa.float64()), "a Parquet column of lists of whole numbers"),
        ([1, 2], pa.int64(), "a Parquet column of lists of whole numbers"),
    ],
)
def test_what_does_not_fit_is_named(tmp_path, values, kind, said):
    write(tmp_path / "a.parquet", values, kind)
    with pytest.raises(DataError, match=r"data\.tokens: window") as caught:
        list(in_order(dataset(tmp_path), 1, 0, 1))
    assert said in str(caught.value)


def test_a_missing_column_is_named(tmp_path, windows):
    write(tmp_path / "a.parquet", windows.tolist(), pa.list_(pa.int32()))
    spec = DataSpec(path=".", train="*.parquet", tokens="widnow")
    with pytest.raises(DataError, match="did you mean 'window'"):
        Dataset(spec, "train", tmp_path)


def test_files_must_agree(tmp_path, windows):
    write(tmp_path / "a.parquet", windows.tolist(), pa.list_(pa.int32()))
    write(tmp_path / "b.parquet", windows[:, :3].tolist(), pa.list_(pa.int32(), 3))
    with pytest.raises(DataError, match="got '3 tokens', expected 5, as before"):
        dataset(tmp_path)
