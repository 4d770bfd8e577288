"""Every command that prints has --json, in a documented shape; every error says what next."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from heterps import cli
from heterps.client import archive
from heterps.client.records import LogText
from protos import scheduler_pb2 as pb

DOCUMENT = Path(__file__).resolve().parents[3] / "docs/json.md"
# The programs of a cluster run until they are ended; a script is for a shell.
WITHOUT = {"scheduler", "node", "console", "completion"}


def commands(group: click.Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    ctx = click.Context(group)
    for name in group.list_commands(ctx):
        command = group.get_command(ctx, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from commands(command, (*path, name))
        else:
            yield " ".join((*path, name)), command


COMMANDS = dict(commands(cli.heterps))


def test_every_command_prints_json_and_says_in_what_shape():
    documented = set(re.findall(r"^\| `heterps ([a-z ]+)`", DOCUMENT.read_text(), re.MULTILINE))
    without = {
        name
        for name, command in COMMANDS.items()
        if not any("--json" in param.opts for param in command.params)
    }
    assert without == WITHOUT
    assert documented == set(COMMANDS) - WITHOUT


@pytest.fixture
def kept():
    status = pb.JobStatus(job_id="clicks-aaa111", name="clicks", state=pb.SUCCEEDED)
    archive.add(status, None, [LogText("stage-0", "hello\nworld\n")])
    return status.job_id


def keys_of(name: str) -> set[str]:
    """The keys at the top that the document gives a command."""
    row = re.search(rf"^\| `heterps {name}` \|([^|]*)\|", DOCUMENT.read_text(), re.MULTILINE)
    assert row is not None
    return set(re.findall(r"`([a-z_]+)`", row[1]))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("context set", ["lab", "--scheduler", "127.0.0.1:7000"]),
        ("context use", ["local"]),
        ("context show", ["local"]),
        ("context remove", ["lab"]),
        ("down", []),
        ("policy show", []),
        ("certs", ["{tmp_path}/certs"]),
        ("get", ["clicks-aaa111", "--to", "{tmp_path}/got"]),
    ],
)
def test_the_shape_is_the_documented_one(run, kept, tmp_path, name, arguments):
    if name == "context remove":
        run("context", "set", "lab", "--scheduler", "127.0.0.1:7000")
    given = [text.format(tmp_path=tmp_path) for text in arguments]
    code, out, _ = run(*name.split(), *given, "--json")
    assert code == 0
    assert set(json.loads(out)) >= keys_of(name) > set()
    if name != "policy show":
        assert set(json.loads(out)) == keys_of(name)


def test_logs_are_an_object_a_line(run, kept):
    code, out, _ = run("logs", kept, "--json")
    assert code == 0
    assert [json.loads(line) for line in out.splitlines()] == [
        {"process": "stage-0", "text": "hello"},
        {"process": "stage-0", "text": "world"},
    ]


@pytest.mark.parametrize(
    "arguments",
    [
        ["submit", "no-such.yaml"],
        ["train", "{job}", "--set", "train.epocs=3"],
        ["train", "{job}", "--set", "data.train=absent.csv"],
        ["submit", "{job}"],
        ["get", "nobody"],
        ["get", "clicks-aaa111", "--to", "{tmp_path}"],
        ["logs", "nobody"],
        ["inspect", "clicks-aaa111", "--html", "x.html"],
        ["diff", "clicks-aaa111", "clicks-aaa111"],
        ["context", "use", "nowhere"],
        ["status"],
        ["certs", "{job}/x"],
        ["plan", "no-such.yaml", "--resources", "r.yaml"],
        ["profile", "no-such.yaml"],
        ["ps", "keys", "--shards", "127.0.0.1:1", "table"],
        ["replan", "nobody"],
    ],
    ids=" ".join,
)
def test_an_error_names_the_next_command(run, kept, job, tmp_path, arguments):
    given = [text.format(job=job, tmp_path=tmp_path) for text in arguments]
    code, _, err = run(*given)
    assert code not in {0, 130}
    if err.startswith("Usage:"):
        assert "--help' for help" in err
        return
    named = re.findall(r"`(heterps [^`]+)`", err)
    assert named, err
    for line in named:
        first = shlex.split(line)[1]
        assert first.startswith("-") or first in cli._COMMANDS, line
