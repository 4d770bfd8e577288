"""Samples of a job's own code: those of its dataset, in batches as of files, or an error."""

import tempfile
from itertools import chain
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from chassis import scratch
from protos.job_pb2 import ColumnSpec, JobSpec
from workers.data import DataError, Dataset, GlobalBatches
from workers.data.batches import in_order
from workers.data.check import check_all
from workers.data.own import samples as own

ROWS = 3000
CODE = """
import numpy as np
import torch
from pathlib import Path
from torch.utils.data import IterableDataset

ROWS = 3000


def sample(row):
    return {
        "row": row,
        "y": torch.tensor(row % 2),
        "word": f"w{row % 7}" if row % 11 else None,
        "gap": np.float32(row / 4) if row % 4 else float("nan"),
        "list": [float(x) for x in range(row % 5)] if row % 3 else None,
        "square": np.full((2, 3), row, np.float32),
    }


class ByIndex(torch.utils.data.Dataset):
    def __init__(self, path, name):
        assert Path(path).is_dir() and name == "train", (path, name)

    def __len__(self):
        return ROWS

    def __getitem__(self, row):
        if not 0 <= row < ROWS:
            raise IndexError(row)
        return sample(row)


class InOrder(IterableDataset):
    def __init__(self, path, name):
        self.path = path

    def __iter__(self):
        return map(sample, range(ROWS))


class Counted(InOrder):
    def __len__(self):
        return ROWS


def generated(path, name):
    for row in range(ROWS):
        yield sample(row)
"""
COLUMNS = {
    "list": ColumnSpec(type="floats", length=4),
    "square": ColumnSpec(type="floats", length=6),
}
SPLIT = {"cache_bytes": 0, "block_rows": 64, "window_rows": 500}


@pytest.fixture
def job(tmp_path):
    (tmp_path / "data.py").write_text(CODE)
    job = JobSpec(directory=str(tmp_path))
    job.data.path, job.data.train, job.data.label = ".", "train", "y"
    job.data.dense.extend(["row", "gap"])
    job.data.sparse.extend(["word", "word*row"])
    job.data.columns["list"].CopyFrom(COLUMNS["list"])
    return job


def of(job, source, **options):
    job.data.source = f"data.py:{source}"
    return Dataset(job.data, "train", job.directory, **options)


def read(job, source, write="", **options):
    """All rows of some code, in order."""
    if write:
        file = f"other{len(write)}.py"
        (Path(job.directory) / file).write_text(CODE + write)
        job.data.source = f"{file}:{source}"
        check_all(job)
        dataset = Dataset(job.data, "train", job.directory, **options)
    else:
        dataset = of(job, source, **options)
    return [batch for _, batch in in_order(dataset, 700, 0, 1)]


@pytest.fixture
def parquet(job):
    """The same rows as files: a reference."""
    scope = {}
    exec(CODE, scope)
    rows = [scope["sample"](row) for row in range(ROWS)]
    for row in rows:
        row["y"], row["gap"] = int(row["y"]), float(row["gap"])
        row["square"] = row["square"].flatten().tolist()
    table = pa.table({name: [row[name] for row in rows] for name in rows[0]})
    pq.write_table(table, f"{job.directory}/rows.parquet", row_group_size=1024)
    spec = JobSpec.FromString(job.SerializeToString())
    spec.data.train = "rows.parquet"
    return spec


@pytest.mark.parametrize("source", ["ByIndex", "InOrder", "Counted", "generated"])
@pytest.mark.parametrize("options", [{}, SPLIT])
def test_samples_are_the_rows_of_the_same_files(job, parquet, source, options):
    files = Dataset(parquet.data, "train", parquet.directory)
    expected = [batch for _, batch in in_order(files, 700, 0, 1)]
    found = read(job, source, **options)
    assert [len(one) for one in found] == [len(one) for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.arrays.keys() == other.arrays.keys()
        for name, array in one.arrays.items():
            assert array.dtype == other[name].dtype
            np.testing.assert_array_equal(array, other[name])
    check_all(job)


def rows_of(*batches):
    return list(chain.from_iterable(batch["dense"][:, 0].astype(int).tolist() for batch in batches))


@pytest.mark.parametrize("source", ["ByIndex", "Counted"])
@pytest.mark.parametrize("options", [{}, SPLIT])
def test_an_epoch_has_each_sample_once_and_the_same_order_from_anywhere(job, source, options):
    batches = GlobalBatches(of(job, source, **options), 256, seed=3, epochs=2)
    steps = [rows_of(batches.read(step)) for step in range(batches.steps)]
    per_epoch = batches.steps_per_epoch
    first, second = (list(chain(*steps[at : at + per_epoch])) for at in (0, per_epoch))
    assert sorted(first) == sorted(second) == list(range(ROWS))
    assert first != second
    assert first[:20] != sorted(first[:20])
    for step in (per_epoch + 3, 5):  # another worker, or one that goes on from a cut
        other = GlobalBatches(of(job, source, **options), 256, seed=3, epochs=2)
        assert rows_of(other.read(step, 10, 90)) == steps[step][10:90]


def test_an_iterable_without_a_length_is_read_again_and_again_until_the_last_step(job):
    with pytest.raises(DataError, match=r"InOrder\('train'\).*max_steps.*__len__"):
        GlobalBatches(of(job, "InOrder"), 256)
    steps = 30  # two and a half times
    batches = GlobalBatches(of(job, "InOrder", **SPLIT), 256, seed=3, max_steps=steps)
    found = [rows_of(batches.read(step)) for step in range(steps)]
    seen = list(chain(*found))
    assert sorted(seen[: 5 * 500]) == list(range(2500))
    assert np.unique(seen, return_counts=True)[1].max() == 3
    other = GlobalBatches(of(job, "InOrder", **SPLIT), 256, seed=3, max_steps=steps)
    assert rows_of(other.read(20)) == found[20]


@pytest.mark.parametrize("source", ["ByIndex", "Counted"])
def test_the_processes_of_a_host_make_samples_once(job, tmp_path, monkeypatch, source):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv(scratch.VARIABLE, str(scratch.folder_of("job", 1)))
    told = (
        "with Path(__file__).with_name('count').open('a') as count: count.write('x')\n    return {"
    )
    (tmp_path / "data.py").write_text(CODE.replace("return {", told))
    own = rows_of(GlobalBatches(of(job, source), ROWS, seed=3).read(0))
    assert (tmp_path / "count").stat().st_size == ROWS
    other = Dataset(job.data, "train", job.directory)  # as of another process
    assert rows_of(GlobalBatches(other, ROWS, seed=3).read(0)) == own
    assert (tmp_path / "count").stat().st_size == ROWS


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("", r"no callable 'Own'"),
        ("def Own(path, name): raise OSError('gone')", r"\.py:Own\('train'\).*OSError: gone"),
        ("def Own(path, name): return 3", r"got 'int'.*__getitem__"),
        ("def Own(path, name): return [(1, 2)]", r"\('train'\)\[0\].*got 'tuple'.*a dict"),
        (
            "def Own(path, name): return [{**sample(r), 'gap': 1 / (r - 1500)} for r in range(9)]"
            " + [sample(9) | {'gap': 'far'}]",
            r"one type",
        ),
        (
            "def Own(path, name):\n"
            "    return [{k: v for k, v in sample(r).items() if r < 7 or k != 'gap'}"
            " for r in range(9)]",
            r"\[7\]: data\.source: got 'gap'.*columns are row",
        ),
        (
            "class Own(ByIndex):\n"
            "    def __getitem__(self, row):\n"
            "        return {**sample(row), 'gap': 1 / (1500 - row)}",
            r"\.py:Own\('train'\)\[1500\].*ZeroDivisionError",
        ),
        (
            "class Own(Counted):\n"
            "    def __iter__(self):\n"
            "        for row in range(ROWS):\n"
            "            yield {**sample(row), 'gap': 1 / (1500 - row)}",
            r"\[1500\].*ZeroDivisionError",
        ),
        ("class Own(Counted):\n    def __len__(self): return ROWS + 1", r"3000 rows.*3001"),
        ("class Own(Counted):\n    def __len__(self): return ROWS - 1", r"3000 rows.*2999"),
        (
            "class Own(ByIndex):\n"
            "    def __getitem__(self, row):"
            " return {**sample(row), 'y': None if row == 2222 else 1}",
            r"row 2223.*data\.label: y.*missing",
        ),
        (
            "class Own(ByIndex):\n"
            "    def __getitem__(self, row):"
            " return {**sample(row), 'gap': np.random.default_rng().normal()}",
            r"other values of gap.*seed what it draws",
        ),
        (
            "held = iter([sample(r) for r in range(99)])\ndef Own(path, name): return held",
            "a new it",
        ),
        (
            "def Own(path, name): return [{**sample(0), 'row': 2**70}]",
            r"\[0:1\].*data\.source: row",
        ),
    ],
)
def test_what_does_not_fit_is_named(job, code, expected):
    with pytest.raises(DataError, match=expected):
        read(job, "Own", code or "x = 1")


def test_values_of_one_block_that_have_other_types_than_those_before_are_seen(job):
    own = "\ndef Own(path, name):\n    return [sample(r) | {'list': %s} for r in range(1500)]"
    code = own % "5.0 if r >= 1024 else []"
    with pytest.raises(DataError, match=r"data\.columns\.list\.of: list: got 'double'"):
        read(job, "Own", code)
    fits = own % "None if r < 900 else [1, 2]"
    found = np.concatenate([batch["list"] for batch in read(job, "Own", fits)])
    assert (found[:900] == 0).all()
    assert (found[900:] == [1, 2, 0, 0]).all()


@pytest.mark.parametrize("none", ["[]", "iter(())"])
def test_no_samples_are_no_split(job, none):
    with pytest.raises(DataError, match=r"data\.train: got 'no rows', expected a split with rows"):
        read(job, "Own", f"def Own(path, name): return {none}")


STATEFUL = """
class Own(InOrder):
    def __init__(self, path, name):
        self.path, self.at = path, 0

    def __iter__(self):
        with Path(self.path, "read").open("a") as told:
            told.write(f"{self.at}\\n")
        for row in range(self.at, ROWS):
            BEFORE
            yield sample(row)
            AFTER

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]
"""
RIGHT = STATEFUL.replace("BEFORE", "self.at = row + 1").replace("AFTER", "")
LATE = STATEFUL.replace("BEFORE", "pass").replace("AFTER", "self.at = row + 1")
LENGTH = "\n    def __len__(self):\n        return ROWS\n"


def test_an_iterable_that_says_where_it_is_goes_on_there(job, monkeypatch):
    monkeypatch.setattr(own, "_BETWEEN", 500)
    for text, steps in ((RIGHT, 45), (RIGHT + LENGTH, 0)):
        (Path(job.directory) / "data.py").write_text(CODE + text)
        file = f"own{steps}.py"
        (Path(job.directory) / file).write_text(CODE + text)
        job.data.source = f"{file}:Own"
        check_all(job)

        def batches(steps=steps):
            dataset = Dataset(job.data, "train", job.directory, **SPLIT)
            return GlobalBatches(dataset, 128, seed=3, epochs=3, max_steps=steps)

        whole, read = batches(), Path(job.directory) / "read"
        expected = [rows_of(whole.read(step)) for step in range(whole.steps)]
        for step in (1, 15, 36):  # in the first pass, and in the second
            position = whole.position(step)
            going_on = batches()
            going_on.go_on(position)
            read.write_text("")
            found = [rows_of(going_on.read(at)) for at in range(step, step + 5)]
            assert found == expected[step : step + 5]
            first = int(read.read_text().split()[0])
            assert (first > 0) == (step > 1)
            behind = batches()  # without it
            assert rows_of(behind.read(step)) == expected[step]
        assert position
        damaged = batches()
        damaged.go_on(position.replace('"at": ', '"at": 1'))
        with pytest.raises(DataError, match="after load_state_dict the sample that followed"):
            damaged.read(36)


# Its state is its own: what it gave before changes as it goes on.
TENSORS = """
import torch

class Own(InOrder):
    def __init__(self, path, name):
        self.path = path
        self.state = {"at": torch.zeros(1, dtype=torch.long), "told": [b""], 0: np.zeros(2)}
        self.generator = np.random.Generator(np.random.MT19937(3))

    def __iter__(self):
        with Path(self.path, "read").open("a") as told:
            told.write(f"{int(self.state['at'])}\\n")
        for row in range(int(self.state["at"]), ROWS):
            self.state["at"] += 1
            self.state[0] += 1
            yield {**sample(row), "draw": self.generator.random()}

    def state_dict(self):
        return {"own": self.state, "draws": self.generator.bit_generator.state}

    def load_state_dict(self, state):
        assert state["own"][0].tolist() == [state["own"]["at"].item()] * 2
        self.state, self.generator.bit_generator.state = state["own"], state["draws"]
"""


def test_states_of_tensors_and_arrays_go_on_where_they_were(job, monkeypatch):
    monkeypatch.setattr(own, "_BETWEEN", 500)
    (Path(job.directory) / "data.py").write_text(CODE + TENSORS)
    job.data.source = "data.py:Own"
    job.data.dense.append("draw")
    check_all(job)

    def batches():
        dataset = Dataset(job.data, "train", job.directory, **SPLIT)
        return GlobalBatches(dataset, 128, seed=3, epochs=3, max_steps=45)

    whole, read = batches(), Path(job.directory) / "read"
    expected = [whole.read(step)["dense"].tolist() for step in range(whole.steps)]
    for step in (15, 36):
        going_on = batches()
        going_on.go_on(whole.position(step))
        read.write_text("")
        found = [going_on.read(at)["dense"].tolist() for at in range(step, step + 5)]
        assert found == expected[step : step + 5]
        assert int(read.read_text().split()[0]) > 0


def test_samples_with_arrays_of_python_objects_are_known_again(job):
    objects = RIGHT.replace(
        "yield sample(row)", "yield sample(row) | {'list': np.array([row / 8, row / 4], object)}"
    )
    assert rows_of(*read(job, "Own", objects)) == list(range(ROWS))


def test_one_that_says_where_it_is_wrongly_is_found_before_training(job):
    with pytest.raises(DataError, match=r"\[32\]: data\.source: .*after load_state_dict"):
        read(job, "Own", LATE)
    unknown = RIGHT.replace('{"at": self.at}', '{"at": self.at, "of": object()}')
    assert rows_of(*read(job, "Own", unknown)) == list(range(ROWS))


@pytest.mark.parametrize(("source", "row"), [("ByIndex", 1500), ("InOrder", 0), ("Counted", 0)])
def test_other_samples_are_seen_where_a_job_goes_on(job, source, row):
    before = of(job, source).contents
    assert of(job, source).contents == before
    changed = CODE.replace('"row": row,', f'"row": row + (row == {row}),')
    (Path(job.directory) / "changed.py").write_text(changed)
    job.data.source = f"changed.py:{source}"
    assert Dataset(job.data, "train", job.directory).contents != before
