"""data.prepare: run apart, shown as it goes, explained when it fails."""

from contextlib import suppress

import pytest

from heterps.errors import DataMismatchError, PrepareError
from heterps.job.data import prepare_and_check
from heterps.job.file import load_job
from heterps.job.prepare import prepare
from workers.stage.cuts.beginning import check_entry


def with_script(job, text):
    job.with_name("prepare.py").write_text(text)
    return load_job(job, ["data.prepare=prepare.py:prepare", "data.path=made", "data.train=t.csv"])


def test_it_gets_the_absolute_path_and_its_lines_are_seen(job):
    text = (
        "import os, pathlib\n"
        "def prepare(path):\n"
        "    assert os.path.isabs(path)\n"
        "    print('one'); print('two')\n"
        "    pathlib.Path(path).mkdir(exist_ok=True)\n"
        "    pathlib.Path(path, 't.csv').write_text('x')\n"
    )
    lines: list[str] = []
    prepare(with_script(job, text), lines.append)
    assert lines == ["one", "two"]
    assert job.with_name("made").joinpath("t.csv").is_file()


def test_what_it_makes_for_the_model_is_of_the_code_that_is_submitted(job):
    text = (
        "import pathlib\n"
        "def prepare(path):\n"
        "    pathlib.Path(path).mkdir(exist_ok=True)\n"
        "    pathlib.Path(path, 't.csv').write_text('x,y\\n1,0\\n')\n"
        "    pathlib.Path(path).with_name('words.py').write_text('COUNT = 7\\n')\n"
    )
    model = job.with_name("model.py")
    model.write_text("from words import COUNT\n" + model.read_text())
    spec = with_script(job, text)
    with suppress(DataMismatchError):  # of the data there is little
        prepare_and_check(spec)
    assert job.with_name("words.py").is_file()
    check_entry(spec)


def test_its_own_error_is_shown_without_our_frames(job):
    text = "def prepare(path):\n    helper()\ndef helper():\n    raise RuntimeError('no network')\n"
    with pytest.raises(PrepareError, match="no network") as caught:
        prepare(with_script(job, text))
    assert "data.prepare: prepare.py:prepare" in str(caught.value)
    assert "importlib" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def prepare(path):\n    pass\n", "data.train: got 't.csv'"),
        ("import nonexistent_thing\ndef prepare(path): ...\n", "nonexistent_thing"),
        ("import os\ndef prepare(path):\n    os._exit(7)\n", "exit code 7"),
        ("import os\ndef prepare(path):\n    os.kill(os.getpid(), 9)\n", "SIGKILL"),
    ],
)
def test_failures_are_named(job, text, said):
    with pytest.raises(PrepareError, match=said):
        prepare(with_script(job, text))
