"""`make fuzz`: each target for some time; what is found goes to tests/fuzz/findings.

python -m tests.fuzz.run --seconds 60 [TARGET ...]
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz import blocks
from tests.fuzz.replay import FINDINGS
from tests.fuzz.targets import ROOT, SLOWEST, TARGETS

_SHOWN = 40  # lines


def keep(target: str, found: Path) -> Path:
    """Keep an input, named by its content, for test_findings.py."""
    data = found.read_bytes()
    kept = FINDINGS / target / hashlib.sha256(data).hexdigest()[:16]
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_bytes(data)
    return kept


def command_of(target: str, seconds: int, folder: Path) -> list[str] | None:
    """What fuzzes a target; None where it cannot be built here."""
    if target != blocks.NAME:
        return [sys.executable, "-m", "tests.fuzz.child", target, str(seconds), str(folder)]
    program = blocks.build(folder, fuzzer=True)
    if program is None:
        return None
    corpus = folder / "corpus"
    corpus.mkdir()
    flags = {
        "max_total_time": seconds,
        "timeout": 6 * SLOWEST,
        "max_len": 1 << 12,
        "print_final_stats": 1,
    }
    given = [f"-{flag}={value}" for flag, value in flags.items()]
    return [str(program), *given, f"-artifact_prefix={folder}/found-", str(corpus)]


def fuzz(target: str, seconds: int) -> bool:
    """Whether nothing was found."""
    folder = Path(tempfile.mkdtemp(prefix=f"fuzz-{target}-"))
    try:
        command = command_of(target, seconds, folder)
        if command is None:
            print(f"{target}: left out, as there is no clang++ with libFuzzer", flush=True)
            return True
        ended = subprocess.run(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
        )
        told = ended.stdout.decode(errors="replace").splitlines()
        found = sorted(folder.glob("found-*"))
        if ended.returncode == 0 and not found:
            executed = [line.split()[-1] for line in told if "number_of_executed_units" in line]
            print(f"{target}: clean, {''.join(executed)} inputs in {seconds} s", flush=True)
            return True
        print("\n".join(told[-_SHOWN:]))
        for each in found:
            print(f"{target}: {each.name}: kept as {keep(target, each).relative_to(ROOT)}")
        print(f"{target}: ended with {ended.returncode}", flush=True)
        return False
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Fuzz all targets, or those that are named."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    every = [*TARGETS, blocks.NAME]
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=", ".join(every))
    parser.add_argument("--seconds", type=int, default=60, help="of each target")
    arguments = parser.parse_args()
    unknown = set(arguments.targets) - set(every)
    if unknown:
        parser.error(f"{', '.join(sorted(unknown))}: expected some of {', '.join(every)}")
    clean = [fuzz(target, arguments.seconds) for target in arguments.targets or every]
    return 0 if all(clean) else 1


if __name__ == "__main__":
    sys.exit(main())
