"""The jobs that are started: examples, with a callback that notes when the first step is over."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from bench.pages import ROOT

# Folder of the example, its job file, and its data's folder in `data`.
JOBS = {
    "flights": ("flights", "job.yaml", "flights"),
    "ctrdnn": ("heterps_paper", "ctrdnn.yaml", "criteo-shaped"),
}
_CALLBACK = '''"""Notes when steps are over."""

import time


class Watch:
    def __init__(self, path):
        self.path = path
        self.told = False

    def on_step(self, state):
        if not self.told:
            self.told = True
            with open(self.path, "w") as file:
                file.write(repr(time.time()))
'''


@dataclass(frozen=True, slots=True)
class Job:
    """A job that trains until it is cancelled.

    Attributes:
        file: its job file, in a folder of its own.
        stepped: holds when the first step was over, seconds since 1970, once it is.
        data: folder of its data.
    """

    name: str
    file: Path
    stepped: Path
    data: Path

    @classmethod
    def make(cls, folder: Path, name: str, data: Path) -> "Job":
        """Copy an example; its data is made in `data` where it is not there yet."""
        example, file, of_data = JOBS[name]
        made = folder / name
        shutil.copytree(ROOT / "examples" / example, made, ignore=shutil.ignore_patterns("*.pyc"))
        (made / "watch.py").write_text(_CALLBACK)
        return cls(name, made / file, folder / f"{name}.stepped", (data / of_data).absolute())

    @property
    def options(self) -> list[str]:
        """Of `heterps train` and `submit`."""
        settings = {
            "data.path": self.data,
            "train.epochs": 1000,
            "model.callbacks": "[watch.py:Watch]",
            "model.callback_args": f"{{Watch: {{path: {self.stepped}}}}}",
            "output": self.file.parent.parent / "runs",
        }
        given = [f"{key}={value}" for key, value in settings.items()]
        return [str(self.file), *(part for one in given for part in ("--set", one))]
