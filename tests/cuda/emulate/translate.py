"""Device code as C++ for a host compiler: text to text, line by line where it was.

What it knows, and `include/device.h` gives meaning to:

- launches `name<<<grid, block, 0, stream>>>(arguments);`, the name with template arguments or
  without, the last two of the four left out or not: shared memory whose size a launch names is not
  known;
- `__shared__ type name;` and `__shared__ type name[size];`, of types without constructors;
- the qualifiers, builtins and intrinsics of `KNOWN`;
- `#pragma unroll`, which goes.

Anything else of CUDA's is an error that names the line: another word that begins with two
underscores, a `cuda` or `atomic` call that is not among `KNOWN`, `asm`.
"""

import re
from collections.abc import Mapping
from pathlib import Path

KNOWN = {
    *("__global__", "__device__", "__host__", "__forceinline__", "__launch_bounds__"),
    *("__restrict__", "__shared__", "__syncthreads", "__syncwarp", "__half", "__nv_bfloat16"),
    *("__shfl_sync", "__shfl_xor_sync", "__shfl_up_sync", "__shfl_down_sync"),
    *("__ballot_sync", "__any_sync", "__all_sync", "__popc", "__ffs", "__CUDACC__"),
    *("atomicAdd", "cudaStream_t", "cudaError_t", "cudaSuccess", "cudaGetLastError"),
    *("cudaDeviceAttr", "cudaDevAttrComputeCapabilityMajor", "cudaDevAttrComputeCapabilityMinor"),
    *("cudaGetErrorString", "cudaMemsetAsync", "cudaGetDevice", "cudaDeviceGetAttribute"),
}
_CUDA = re.compile(r"\b(__\w+|(?:cuda|atomic)[A-Z]\w*|asm|extern\s+__shared__)\b")
_SHARED = re.compile(
    r"__shared__\s+(?P<type>[\w:]+(?:\s*<[^;{}]*>)?)\s+(?P<name>\w+)\s*(?P<size>\[[^;\]]*\])?\s*;"
)
_NAME = re.compile(r"[\w:]+$")


class Unknown(ValueError):
    """Device code that the translation does not know."""


def translate(text: str, name: str) -> str:
    """The C++ of a source or header.

    Args:
        text: its CUDA C++.
        name: its path, for messages of the compiler and ours.

    Raises:
        Unknown: something that is not among what the module names.
    """
    code = _without_comments(text)
    for found in _CUDA.finditer(code):
        if found[0] not in KNOWN:
            raise _unknown(code, found.start(), name, found[0])
    edits = [*_launches(code, text, name), *_shared(code, name)]
    edits += [(m.start(), m.end(), "") for m in re.finditer(r"#pragma unroll.*", code)]
    for begin, end, new in sorted(edits, reverse=True):
        lines = text.count("\n", begin, end) - new.count("\n")
        text = text[:begin] + new + "\n" * lines + text[end:]
    return f'#include "device.h"\n#line 1 "{name}"\n{text}'


def translate_tree(sources: Mapping[str, str], to: Path) -> None:
    """Write the translation of each source, by its path, below `to`."""
    for name, text in sources.items():
        path = to / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(translate(text, name) if path.suffix in (".cu", ".cuh") else text)


def _unknown(code: str, at: int, name: str, what: str) -> Unknown:
    line = code.count("\n", 0, at) + 1
    return Unknown(f"{name}:{line}: {what}: the emulation does not know it (see translate.py)")


def _without_comments(text: str) -> str:
    """Blanks where comments and strings are, so that places are those of `text`."""
    pattern = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"", re.S)
    return pattern.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def _shared(code: str, name: str) -> list[tuple[int, int, str]]:
    edits = []
    for word in re.finditer("__shared__", code):
        found = _SHARED.match(code, word.start())
        if found is None:
            raise _unknown(code, word.start(), name, "__shared__ of this form")
        kind = found["type"] + (found["size"] or "")
        new = f"auto& {found['name']} = emulate::shared<{kind}>([] {{}});"
        edits.append((found.start(), found.end(), new))
    return edits


def _launches(code: str, text: str, name: str) -> list[tuple[int, int, str]]:
    edits = []
    for found in re.finditer("<<<", code):
        begin = _kernel_begin(code, found.start())
        close = code.find(">>>", found.end())
        opened = re.compile(r"\s*\(").match(code, close + 3) if close >= 0 else None
        if begin is None or opened is None:
            raise _unknown(code, found.start(), name, "a launch of this form")
        end = _closing(code, opened.end() - 1)
        settings = _parts(code[found.end() : close])
        if not 2 <= len(settings) <= 4 or (len(settings) > 2 and settings[2].strip() != "0"):
            raise _unknown(code, found.start(), name, "a launch with such settings")
        # Settings hold no strings, so that the code without comments does.
        kernel, arguments = text[begin : found.start()].rstrip(), text[opened.end() : end]
        bare = kernel.partition("<")[0].strip()
        stream = f", {settings[3].strip()}" if len(settings) == 4 else ""
        new = (
            f'emulate::launch("{bare}", {settings[0].strip()}, {settings[1].strip()}, '
            f"[=] {{ {kernel}({arguments}); }}{stream})"
        )
        edits.append((begin, end + 1, new))
    return edits


def _kernel_begin(code: str, end: int) -> int | None:
    """Where the kernel's name begins that ends, with its template arguments, before `end`."""
    end = len(code[:end].rstrip())
    if code[end - 1] == ">":
        depth = 0
        for at in range(end - 1, -1, -1):
            depth += {">": 1, "<": -1}.get(code[at], 0)
            if depth == 0:
                end = at
                break
    found = _NAME.search(code, 0, end)
    return None if found is None else found.start()


def _closing(code: str, at: int) -> int:
    depth = 0
    for i in range(at, len(code)):
        depth += {"(": 1, ")": -1}.get(code[i], 0)
        if depth == 0:
            return i
    return len(code)


def _parts(code: str) -> list[str]:
    """What stands between commas that are in no parentheses."""
    parts, depth = [""], 0
    for letter in code:
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += letter
    return parts
