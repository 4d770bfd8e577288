"""What fuzzing found, and what it begins with, once more: `python -m tests.fuzz.replay`."""

import faulthandler
import logging
import signal
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NoReturn

from tests.fuzz.targets import SLOWEST, TARGETS, bound_memory, refusals

FINDINGS = Path(__file__).parent / "findings"


def too_slow(*_: object) -> NoReturn:
    """End what takes too long."""
    raise AssertionError(f"took over {SLOWEST} s")


def main() -> int:
    """How many inputs end otherwise than their target documents."""
    faulthandler.enable()
    logging.disable()
    signal.signal(signal.SIGPROF, too_slow)
    failed = 0
    parsers = []
    with tempfile.TemporaryDirectory() as folder:
        for name, target in TARGETS.items():
            seeds, work = Path(folder, name, "seeds"), Path(folder, name, "work")
            seeds.mkdir(parents=True)
            work.mkdir()
            inputs = {f"seed {n}": data for n, data in enumerate(target.seeds(seeds))}
            inputs |= {p.name: p.read_bytes() for p in sorted((FINDINGS / name).glob("*"))}
            parsers.append((name, target.open(work), refusals(target), inputs))
        bound_memory()
        for name, parse, refused, inputs in parsers:
            for shown, data in inputs.items():
                signal.setitimer(signal.ITIMER_PROF, SLOWEST)
                try:
                    parse(data)
                except refused:
                    pass
                except BaseException:
                    failed += 1
                    print(f"{name}: {shown}:\n{traceback.format_exc(limit=-4)}")
                finally:
                    signal.setitimer(signal.ITIMER_PROF, 0)
            print(f"{name}: {len(inputs)} inputs")
    return failed


if __name__ == "__main__":
    sys.exit(min(main(), 100))
