"""One target under Atheris: `python -m tests.fuzz.child TARGET SECONDS FOLDER`, of `make fuzz`."""

import contextlib
import inspect
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FunctionType
from typing import Any

import atheris

from tests.fuzz.targets import SLOWEST, TARGETS, bound_memory, refusals

LONGEST = 1 << 14  # bytes of an input


def functions(holder: object) -> Iterator[FunctionType]:
    """Those that a module or class defines, in classes of it too."""
    module = getattr(holder, "__module__", None) or getattr(holder, "__name__", "")
    for value in list(vars(holder).values()):
        inner = getattr(value, "__func__", getattr(value, "fget", value))
        inner = inspect.unwrap(inner) if callable(inner) else inner
        if getattr(inner, "__module__", None) != module:
            continue
        if isinstance(inner, FunctionType):
            yield inner
        elif isinstance(inner, type):
            yield from functions(inner)


def count_branches(modules: tuple[str, ...]) -> None:
    """Have the fuzzer told of the branches that these modules, once imported, take.

    Not by Atheris' import hook: an editable installation has a finder of its own.
    """
    for name, module in list(sys.modules.items()):
        if any(name == each or name.startswith(f"{each}.") for each in modules):
            for function in functions(module):
                atheris.instrument_func(function)


def main(name: str, seconds: int, folder: Path) -> None:
    """Fuzz until the time is over or something is found, which then lies in `folder`."""
    target = TARGETS[name]
    logging.disable()
    seeds, work, corpus = folder / "made", folder / "work", folder / "corpus"
    for each in (seeds, work, corpus):
        each.mkdir(parents=True, exist_ok=True)
    for number, data in enumerate(target.seeds(seeds)):
        (corpus / f"seed-{number}").write_bytes(data)
    parse, refused = target.open(work), refusals(target)
    for each in corpus.iterdir():  # imports what is imported late
        with contextlib.suppress(*refused):
            parse(each.read_bytes())
    count_branches(target.modules)

    def one(data: bytes) -> None:
        with contextlib.suppress(*refused):
            parse(data)

    bound_memory()
    flags = {
        "max_total_time": seconds,
        "timeout": 6 * SLOWEST,
        "max_len": LONGEST,
        "rss_limit_mb": 0,  # the limit of the address space is the one
        "artifact_prefix": f"{folder}/found-",
        "print_final_stats": 1,
    }
    arguments: list[Any] = [f"-{flag}={value}" for flag, value in flags.items()]
    atheris.Setup([sys.argv[0], *arguments, str(corpus)], one)
    atheris.Fuzz()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
