"""Pictures as inputs: those of Pillow, wherever they lie, or an error that names them."""

import io
from itertools import chain

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image, ImageOps
from torch import nn

from protos.job_pb2 import ColumnSpec, JobSpec
from tests.workers.stage.in_process import Pipeline
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.check import check
from workers.data.tensors import first_samples, tensors_of
from workers.model.chain.trace import TracedModel
from workers.model.module.inputs import inputs_of

ROWS, SIZE = 24, (6, 8)  # height, width
PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, *SIZE, 3), np.uint8)


def stored(pixels, kind="PNG", mode="RGB", **options):
    written = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(written, kind, **options)
    return written.getvalue()


@pytest.fixture
def job(tmp_path):
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.label = ".", "a.parquet", "y"
    job.data.columns["image"].CopyFrom(ColumnSpec(of="i", type="image", shape=(3, *SIZE)))
    return job


def write(job, pictures):
    column = pictures if isinstance(pictures, pa.Array) else pa.array(pictures)
    table = pa.table({"i": column, "y": [row % 2 for row in range(len(column))]})
    pq.write_table(table, f"{job.directory}/a.parquet", row_group_size=10)
    return table


def read(job):
    check(job)
    dataset = Dataset.of(job, "train")
    return tensors_of(first_samples(dataset, dataset.rows))["image"]


@pytest.mark.parametrize("where", ["bytes", "struct", "paths", "in the struct", "csv"])
def test_pictures_are_the_same_wherever_they_lie(job, tmp_path, where):
    pictures = [stored(one, "JPEG" if row % 2 else "PNG") for row, one in enumerate(PIXELS)]
    names = [f"pictures/{row}.jpg" for row in range(ROWS)]
    (tmp_path / "pictures").mkdir()
    for name, picture in zip(names, pictures, strict=True):
        (tmp_path / name).write_bytes(picture)
    whole = [{"bytes": p, "path": n} for p, n in zip(pictures, names, strict=True)]
    column = {
        "bytes": pictures,
        "struct": whole,
        "in the struct": [{"bytes": None, "path": name} for name in names],
    }.get(where, names)
    if where == "in the struct":
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        column = pa.array(column, kind)
    table = write(job, column)
    if where == "csv":
        pa.csv.write_csv(table, tmp_path / "a.csv")
        job.data.train = "a.csv"
    found = read(job)
    assert found.dtype == torch.float32
    for one, picture in zip(found, pictures, strict=True):
        plain = np.asarray(Image.open(io.BytesIO(picture)).convert("RGB")).transpose(2, 0, 1)
        torch.testing.assert_close(one, torch.from_numpy(plain.copy()) / 255, rtol=0, atol=0)


@pytest.mark.parametrize(("channels", "mode"), [(1, "L"), (3, "RGB"), (4, "RGBA")])
@pytest.mark.parametrize("kept", ["RGB", "L", "P", "RGBA", "1"])
def test_channels_are_those_of_pillow(job, channels, mode, kept):
    job.data.columns["image"].shape[0] = channels
    picture = stored(PIXELS[0], mode=kept)
    write(job, [picture])
    plain = np.asarray(Image.open(io.BytesIO(picture)).convert(mode)).reshape(*SIZE, channels)
    expected = torch.from_numpy(plain.transpose(2, 0, 1) / np.float32(255))
    torch.testing.assert_close(read(job)[0], expected, rtol=0, atol=1e-7)


@pytest.mark.parametrize("fit", ["resize", "crop"])
def test_pictures_of_other_sizes_are_fitted_where_it_is_said(job, fit):
    large = np.random.default_rng(1).integers(0, 256, (20, 50, 3), np.uint8)
    write(job, [stored(PIXELS[0]), stored(large)])
    with pytest.raises(DataError, match=r"row 2: .*image.*20 x 50.*6 x 8 pixels, or fit"):
        read(job)
    job.data.columns["image"].fit = fit
    how = Image.Resampling.BILINEAR
    opened = Image.fromarray(large)
    plain = (
        opened.resize(SIZE[::-1], how) if fit == "resize" else ImageOps.fit(opened, SIZE[::-1], how)
    )
    found = read(job)
    np.testing.assert_array_equal(
        (found[1] * 255).round().byte().numpy(), np.asarray(plain).transpose(2, 0, 1)
    )
    np.testing.assert_array_equal(
        (found[0] * 255).round().byte().numpy(), PIXELS[0].transpose(2, 0, 1)
    )


def test_a_picture_stands_as_its_camera_says(job):
    turned = Image.Exif()
    turned[0x0112] = 6
    write(job, [stored(PIXELS[0].transpose(1, 0, 2), exif=turned)])
    expected = np.rot90(PIXELS[0].transpose(1, 0, 2), -1).transpose(2, 0, 1)
    np.testing.assert_array_equal((read(job)[0] * 255).round().byte().numpy(), expected)


DEEP = io.BytesIO()
Image.fromarray(np.full(SIZE, 40000, np.uint16)).save(DEEP, "PNG")


@pytest.mark.parametrize(
    ("pictures", "expected"),
    [
        ([stored(PIXELS[0])[:-40]], r"a\.parquet, row 1: data\.columns\.image\.of: i.*a whole"),
        ([stored(PIXELS[0], "JPEG")[:-40]], r"row 1: .*a whole picture"),
        ([stored(PIXELS[0]), b"no picture"], r"row 2: .*UnidentifiedImageError"),
        ([stored(PIXELS[0]), None], r"row 2: .*missing"),
        ([DEEP.getvalue()], r"row 1: .*mode I.*8 bits a channel"),
        (["gone.png"], r"row 1: .*gone\.png: FileNotFoundError"),
        ([3], r"int64.*a column of pictures"),
        ([[stored(PIXELS[0])]], r"list.*a column of pictures"),
    ],
)
def test_what_is_no_picture_is_named(job, pictures, expected):
    write(job, pictures)
    with pytest.raises(DataError, match=expected):
        read(job)


def test_lists_of_a_shape_are_tensors_of_it(job):
    values = np.arange(2 * 3 * 4).reshape(2, 3, 4)
    job.data.columns.clear()
    job.data.columns["a"].CopyFrom(ColumnSpec(of="i", type="floats", shape=(3, 4)))
    job.data.columns["b"].CopyFrom(ColumnSpec(of="i", type="ints", shape=(3, 4)))
    for lists in (values.tolist(), values.reshape(2, 12).tolist()):
        write(job, lists)
        check(job)
        found = tensors_of(first_samples(Dataset.of(job, "train"), 2))
        np.testing.assert_array_equal(found["a"].numpy(), values.astype(np.float32))
        np.testing.assert_array_equal(found["b"].numpy(), values)
    for lists, expected in (
        ([values[0].tolist(), values[1, :2].tolist()], r"row 2: .*a list of 2.*\[3, 4\]"),
        ([values[0].tolist(), values[1].T.tolist()], r"row 2: .*a list of 4.*\[3, 4\]"),
        ([values[0].tolist(), [[0] * 4, [0] * 3, [0] * 4]], r"row 2: .*a list of 3.*\[3, 4\]"),
        ([values[0].tolist(), None], r"row 2: .*missing.*\[3, 4\]"),
        ([values[0].tolist(), [[0] * 4, None, [0] * 4]], r"row 2: .*missing.*\[3, 4\]"),
        ([values[0].tolist(), [[0] * 4, [0, 0, None, 0], [0] * 4]], r"columns\.b.*row 2|row 2.*b"),
        ([[["a"] * 4] * 3], "lists of numbers"),
    ):
        write(job, lists)
        with pytest.raises(DataError, match=expected):
            check(job)


class Seen(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Conv2d(3, 2, 3)
        self.head = nn.Sequential(nn.ReLU(), nn.Flatten(), nn.Linear(2 * 4 * 6, 1))

    def forward(self, image):
        return self.head(self.body(image)).squeeze(1)


def build():
    torch.manual_seed(5)
    return Seen()


@pytest.mark.parametrize(("cuts", "widths"), [([1], [2]), ([0, 1], [2, 1])])
def test_a_model_of_pictures_trains_as_in_plain_pytorch(job, cuts, widths):
    write(job, [stored(one) for one in PIXELS])
    job.train.batch_size, job.train.seed = 6, 3
    job.train.optimizer.name, job.train.optimizer.learning_rate = "sgd", 0.1

    class Pipe(Pipeline):
        def _graph(self, stage):
            first = self._cuts[stage - 1] + 1 if stage else 0
            traced = TracedModel(self._build(), inputs_of(job.data))
            self._layers = [layer.name for layer in traced.layers]
            return traced.stage(first, self._cuts[stage])

    batches = GlobalBatches.of(job, Dataset.of(job, "train"))
    steps = [batches.read(step) for step in range(batches.steps)]
    workers = Pipe(job, build, cuts, widths, steps, 3).run()
    model = build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    plain = {one.tobytes(): one for one in PIXELS.transpose(0, 3, 1, 2)}
    for batch in steps:
        optimizer.zero_grad()
        whole = np.stack([plain[one.tobytes()] for one in batch["image"]])
        out = model(torch.from_numpy(whole).float() / 255)
        labels = torch.from_numpy(batch["label.label"])
        nn.functional.binary_cross_entropy_with_logits(out, labels).backward()
        optimizer.step()
    state = model.state_dict()
    for worker in chain(*workers):
        for name, value in worker.module.state_dict().items():
            torch.testing.assert_close(value, state[name], rtol=2e-5, atol=2e-6)
