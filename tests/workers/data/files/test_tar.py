"""Tars of samples: their members by ending, whatever their order; or an error before training."""

import io
import json
import tarfile

import numpy as np
import pytest
from PIL import Image

from protos.job_pb2 import ColumnSpec, JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.check import check
from workers.data.columns.arrays import concatenate
from workers.model.saved.predict import rows as predicted

ROWS, SHAPE = 600, (3, 4, 5)
PIXELS = np.random.default_rng(0).integers(0, 256, (ROWS, *SHAPE), np.uint8)


def png(pixels):
    written = io.BytesIO()
    Image.fromarray(pixels.transpose(1, 2, 0)).save(written, "PNG")
    return written.getvalue()


def npy(values):
    written = io.BytesIO()
    np.save(written, values)
    return written.getvalue()


def members(rows):
    """Those of so many samples, each of which stands beside its own or apart from them."""
    found = []
    for row in rows:
        facts = {"age": row / 4 if row % 3 else None, "ids": list(range(row % 4))}
        parts = {
            "cls": str(row % 2).encode() + b"\n",
            "png": png(PIXELS[row]),
            "json": json.dumps(facts if row % 5 else {"ids": []}).encode(),
            "t.npy": npy(np.full((2, 3), row, np.float32)),
            "txt": f"wörd {row % 7}".encode(),
        }
        found += [(f"some.dir/{row:05d}.{ending}", content) for ending, content in parts.items()]
    return found


def write(path, some):
    with tarfile.open(path, "w") as archive:
        for name, content in some:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))


@pytest.fixture(scope="module")
def tars(tmp_path_factory):
    """Two tars; in the second all pictures come first."""
    folder = tmp_path_factory.mktemp("tars")
    write(folder / "a-0.tar", [("some.dir/._1.png", b"x"), ("README", b"x"), *members(range(250))])
    apart = sorted(members(range(250, ROWS)), key=lambda member: not member[0].endswith("png"))
    write(folder / "a-1.tar", apart)
    return folder


@pytest.fixture
def job(tars):
    return job_of(tars)


def job_of(folder, train="a-*.tar"):
    job = JobSpec(directory=str(folder))
    job.data.path, job.data.train, job.data.label = ".", train, "cls"
    job.data.dense.extend(["json.age"])
    job.data.sparse.extend(["txt", "__key__"])
    for name, spec in {
        "image": ColumnSpec(of="png", type="image", shape=SHAPE),
        "ids": ColumnSpec(of="json.ids", type="ints", length=3),
        "t": ColumnSpec(of="t.npy", type="floats", shape=(2, 3)),
    }.items():
        job.data.columns[name].CopyFrom(spec)
    return job


@pytest.mark.parametrize("options", [{}, {"cache_bytes": 0, "block_rows": 64, "window_rows": 99}])
def test_rows_are_the_samples(job, options):
    check(job)
    dataset = Dataset(job.data, "train", job.directory, **options)
    assert dataset.rows == ROWS
    found = concatenate([batch for _, batch in in_order(dataset, 97, 0, 1)])
    row = np.arange(ROWS)
    np.testing.assert_array_equal(found["image"], PIXELS)
    np.testing.assert_array_equal(found["label.label"], row % 2)
    age = np.where((row % 3 > 0) & (row % 5 > 0), row / 4, 0)
    np.testing.assert_array_equal(found["dense"][:, 0], age.astype(np.float32))
    np.testing.assert_array_equal(found["t"], np.full((ROWS, 2, 3), row[:, None, None]))
    for at, ids in enumerate(found["ids"]):
        values = list(range(at % 4)) if at % 5 else []
        assert ids.tolist() == values + [0] * (3 - len(values))
    words, names = found["sparse"].T
    assert len(set(words)) == 7
    assert (words == words[row % 7]).all()
    assert len(set(names)) == ROWS


def test_an_epoch_has_each_sample_once_and_mixes_those_of_a_tar(job):
    options = {"cache_bytes": 0, "block_rows": 64, "window_rows": 150}
    batches = GlobalBatches(Dataset(job.data, "train", job.directory, **options), 64, seed=3)
    steps = [batches.read(step)["t"][:, 0, 0].astype(int) for step in range(batches.steps)]
    assert sorted(np.concatenate(steps)) == list(range(ROWS))
    for step in (7, 3):
        other = GlobalBatches(Dataset(job.data, "train", job.directory, **options), 64, seed=3)
        np.testing.assert_array_equal(other.read(step, 5, 50)["t"][:, 0, 0], steps[step][5:50])


def cut(count):
    def damage(content):
        return content[:count]

    return damage


def in_the_last_member(content):
    return content.rstrip(b"\0")[:-3]


def without_end(content):
    """As if writing had ended behind a member."""
    return content[: -(-len(content.rstrip(b"\0")) // 512) * 512]


def header(content):
    at = content.index(b"some.dir/00004.png")
    return content[:at] + b"\x01" * 300 + content[at + 300 :]


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (in_the_last_member, r"a\.tar: contents.*unexpected end"),
        (cut(1024), r"a\.tar: contents"),
        (cut(100), r"a\.tar: contents"),
        (without_end, r"a\.tar: contents.*no end of the tar"),
        (header, r"a\.tar: contents.*no member and no end of the tar at byte"),
    ],
)
def test_a_damaged_tar_is_found_before_training(tmp_path, damage, expected):
    write(tmp_path / "a.tar", members(range(9)))
    (tmp_path / "a.tar").write_bytes(damage((tmp_path / "a.tar").read_bytes()))
    with pytest.raises(DataError, match=expected):
        check(job_of(tmp_path, "a.tar"))


def changed(name, content):
    return [(n, c) for n, c in members(range(9)) if n != name] + [(name, content)]


PNG = "some.dir/00004.png"


@pytest.mark.parametrize(
    ("some", "expected"),
    [
        ([*members(range(9)), (PNG, png(PIXELS[4]))], r"00004\.png'.*each member once"),
        (changed(PNG, png(PIXELS[4])[:-30]), r"a\.tar, row 5: .*columns\.image.*00004\.png: "),
        (changed(PNG, b""), r"a\.tar, row 5: .*00004\.png: Unid.*a whole picture"),
        ([m for m in members(range(9)) if m[0] != PNG], r"row 5.*got 'missing'"),
        (changed("some.dir/00004.cls", b"1.5"), r"row 5: some\.dir/00004\.cls.*what a \.cls"),
        (
            [m for m in members(range(9)) if m[0] != "some.dir/00004.cls"],
            r"row 5: data\.label: cls: got 'missing'",
        ),
        (changed("some.dir/00004.json", b"{"), r"row 5: some\.dir/00004\.json"),
        (changed("some.dir/00004.json", b'{"age": "old"}'), r"json\.age: .*one type|json\.age"),
        (changed("some.dir/00004.t.npy", b"x"), r"row 5: some\.dir/00004\.t\.npy"),
        (changed("some.dir/00004.t.npy", npy(np.zeros((3, 2)))), r"row 5: .*columns\.t.*\[2, 3\]"),
        (changed("some.dir/00004.txt", b"\xff"), r"row 5: some\.dir/00004\.txt"),
    ],
)
def test_what_does_not_fit_is_named_with_its_member(tmp_path, some, expected):
    write(tmp_path / "a.tar", some)
    with pytest.raises(DataError, match=expected):
        check(job_of(tmp_path, "a.tar"))


def test_links_are_refused_and_missing_columns_named(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"got '1\.png', expected files"):
        check(job_of(tmp_path, "a.tar"))
    write(tmp_path / "a.tar", [("1.jpg", png(PIXELS[0])), ("1.cls", b"1")])
    with pytest.raises(DataError, match=r"columns are __key__, cls, jpg"):
        check(job_of(tmp_path, "a.tar"))


def test_predictions_read_them_too(job, tars):
    paths = predicted.find(str(tars))
    assert [path.name for path in paths] == ["a-0.tar", "a-1.tar"]
    assert predicted.known_rows(paths) == ROWS
