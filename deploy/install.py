"""Install with pip, and say in one line what it is at: how `make` fills `.venv`.

    python deploy/install.py LABEL PIP-ARGUMENT...

On a terminal the line is written over each second, elsewhere a line is added every half minute.
What pip itself says is shown where it fails, and its exit status is this one's.
"""

import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterable

_ON_TERMINAL = sys.stdout.isatty()
_EVERY_S = 1.0 if _ON_TERMINAL else 30.0
_PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--progress-bar=off"]


class Progress:
    """What pip is at, as its output tells."""

    def __init__(self) -> None:
        self.doing, self.packages = "starting", 0
        self.output: list[str] = []

    def follow(self, lines: Iterable[str]) -> None:
        """Read what pip says until it ends."""
        for line in lines:
            self.output.append(line)
            if found := re.match(r"Collecting ([\w.-]+)", line):
                self.packages += 1
                self.doing = f"collecting {found[1]}"
            elif found := re.match(r"\s*Building (?:wheel|editable) for ([\w.-]+)", line):
                self.doing = f"building {found[1]}"
            elif found := re.match(r"Installing collected packages: (.*)", line):
                self.packages = len(found[1].split(","))
                self.doing = "installing"


def main(label: str, *arguments: str) -> int:
    """Run `pip install` with the arguments; its exit status."""
    began = time.monotonic()
    progress = Progress()

    def say(doing: str, end: str) -> None:
        took = f"{time.monotonic() - began:.0f} s"
        over = "\r\033[K" if _ON_TERMINAL else ""
        print(f"{over}{label}: {doing}, {progress.packages} packages, {took}", end=end, flush=True)

    with subprocess.Popen(
        [*_PIP, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as pip:
        assert pip.stdout is not None
        reader = threading.Thread(target=progress.follow, args=(pip.stdout,))
        reader.start()
        while reader.is_alive():
            say(progress.doing, "" if _ON_TERMINAL else "\n")
            reader.join(_EVERY_S)
    say("failed" if pip.returncode else "done", "\n")
    if pip.returncode:
        sys.stderr.writelines(progress.output)
    return pip.returncode


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
