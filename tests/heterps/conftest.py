"""A job that is right in every key, and a home folder of the test's own."""

import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from heterps import cli

RESOURCES = """\
types:
  - {name: cpu, price_per_hour: 0.04, limit: 8, memory_bytes: 4.0e9, device: cpu}
  - {name: t4, price_per_hour: 0.35, limit: 4, memory_bytes: 1.6e10, device: cuda}
"""
JOB = """\
name: clicks
model:
  entry: model.py:build
  args: {hidden: [64, 32], rate: 1e-3}
data:
  train: train.csv
  label: clicked
  dense: [age]
  sparse: [user, user*item]
train:
  epochs: 2
schedule:
  resources: resources.yaml
"""
# A background shell leaves Ctrl-C ignored, and children inherit that.
_INTERRUPTIBLE = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
from heterps.cli import main
sys.exit(main())
"""


class Clock:
    """A time that goes on when the test says so."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def interruptible() -> list[str]:
    """The command `heterps`, as a terminal would start it."""
    return [sys.executable, "-c", _INTERRUPTIBLE]


@pytest.fixture(autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("home")
    monkeypatch.setenv("HETERPS_HOME", str(folder))
    monkeypatch.delenv("HETERPS_SCHEDULER", raising=False)
    monkeypatch.delenv("HETERPS_CONTEXT", raising=False)
    monkeypatch.setenv("COLUMNS", "80")
    return folder


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """A program that was called in this process leaves no handler on a stream that is closed."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        if not type(handler).__module__.startswith("_pytest"):
            root.removeHandler(handler)
    root.setLevel(level)


@pytest.fixture
def job(tmp_path: Path) -> Path:
    """The job file, with the files that it names beside it."""
    (tmp_path / "resources.yaml").write_text(RESOURCES)
    (tmp_path / "model.py").write_text("def build(hidden, rate): ...\n")
    (tmp_path / "train.csv").write_text("user,item,age,clicked\n1,2,3,0\n")
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Call the command line in this process: exit code, output, errors; never a traceback."""

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli.main(list(arguments))
        out, err = capfd.readouterr()
        assert "Traceback" not in out + err
        return code, out, err

    return call
