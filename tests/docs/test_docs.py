"""What the pages name is there: links, files, functions, modules, commands, make's targets."""

import ast
import re
from functools import cache
from pathlib import Path

import click
import pytest

from heterps.cli import heterps

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(
    page.relative_to(ROOT)
    for pattern in ("*.md", "docs/*.md", "deploy/**/*.md", "examples/**/*.md")
    for page in ROOT.glob(pattern)
)
ROOMS = ("heterps", "scheduler", "workers", "ps", "chassis", "protos", "bench")
FOLDERS = (*ROOMS, "cuda", "tests", "docs", "deploy", "examples")
# Named like modules: a key of metadata, the name in a certificate, a logger.
NOT_MODULES = {"heterps.spec", "heterps.internal", "heterps.stage"}
ROLES = ("scheduler", "node", "ps")  # parse their arguments by themselves

FENCED = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
NAME = re.compile(rf"(?<![\w./-])(?:{'|'.join(ROOMS)})(?:\.[A-Za-z_]\w*)+")
FILE = re.compile(rf"((?:{'|'.join(FOLDERS)})/[\w./-]*)(?:::(\w+))?(?:\[.*\])?")
COMMAND = re.compile(r"(?:\$ )?(?:\.venv/bin/)?heterps ([a-z][\w-]*(?: [^#|;&]*)?)")
TARGET = re.compile(r"make ([a-z][\w-]*)")


def prose(page: Path) -> str:
    return FENCED.sub("", (ROOT / page).read_text())


def code(page: Path) -> list[str]:
    """The code of a page: each span, and each line of a block."""
    text = (ROOT / page).read_text().replace("\\\n", " ")
    blocks = [line for block in FENCED.findall(text) for line in block.splitlines()[1:-1]]
    spans = [" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", text))]
    return spans + [line.strip() for line in blocks]


@cache
def anchors(page: Path) -> set[str]:
    """The places that a link may name, as GitHub makes them of headings."""
    headings = re.findall(r"^#+ +(.*)$", FENCED.sub("", page.read_text()), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)|`", r"\1", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@cache
def defined(file: Path) -> set[str]:
    """The names that a file defines; of a room's face, those that it offers."""
    if file.suffix not in (".py", ".pyi"):  # C++: near enough
        return set(re.findall(r"\w+", file.read_text()))
    tree = ast.parse(file.read_text())
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                names.add(name)
            case ast.ClassDef(name=name) | ast.alias(asname=str(name)) | ast.alias(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                names.add(name)
    face = file.with_suffix(".pyi")
    return names | (defined(face) if file.suffix == ".py" and face.is_file() else set())


def is_there(name: str) -> bool:
    """Whether a dotted name leads to a module, or to what one defines."""
    parts = name.split(".")
    place = ROOT
    while parts and (place / parts[0]).is_dir():
        place /= parts.pop(0)
    if parts and (place / f"{parts[0]}.py").is_file():
        place /= f"{parts.pop(0)}.py"
    else:
        place /= "__init__.py"
    return not parts or (place.is_file() and parts[0] in defined(place))


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page):
    wrong = []
    for link in LINK.findall(prose(page)):
        if "://" in link or link.startswith("mailto:"):
            continue
        path, _, anchor = link.partition("#")
        target = (ROOT / page).parent / path if path else ROOT / page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_files_and_what_they_define_are_there(page):
    wrong = []
    for word in " ".join(code(page)).split():
        if named := FILE.fullmatch(word):
            file, name = ROOT / named[1], named[2]
            if not file.exists() or (name and name not in defined(file)):
                wrong.append(word)
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_modules_and_their_names_are_there(page):
    named = {name for line in code(page) for name in NAME.findall(line)} - NOT_MODULES
    for line in code(page):
        if found := re.match(rf"from ((?:{'|'.join(ROOMS)})[\w.]*) import ([\w, ]+)", line):
            named |= {f"{found[1]}.{name.split()[0]}" for name in found[2].split(",")}
    assert [name for name in sorted(named) if not is_there(name)] == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_commands_and_their_options_are_there(page):
    wrong = []
    for line in code(page):
        if typed := COMMAND.match(line):
            command: click.Command | None = heterps
            words = typed[1].split()
            while words and isinstance(command, click.Group):
                if command.name in ROLES and words[0].startswith("-"):
                    break
                word = words.pop(0)
                command = command.get_command(click.Context(command), word)
            if command is None:
                wrong.append(line)
            elif command.name not in ROLES:
                known = {"--help", *(name for one in command.params for name in one.opts)}
                known |= {name for one in command.params for name in one.secondary_opts}
                given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
                wrong += [f"{line}: {option}" for option in sorted(given - known)]
    assert wrong == []


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_targets_of_make_are_there(page):
    targets = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = {found[1] for line in code(page) if (found := TARGET.match(line))}
    assert named <= targets
