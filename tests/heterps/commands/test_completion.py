"""Completion: what is offered, by click's machinery and by a real shell."""

import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from heterps.cli import heterps
from heterps.client import archive
from heterps.errors import OK, USAGE
from heterps.home import contexts
from protos import scheduler_pb2 as pb
from protos.job_pb2 import JobSpec
from scheduler.service.process import SchedulerProcess
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.store import Store

ROOT = Path(__file__).resolve().parents[3]
Run = Callable[..., tuple[int, str, str]]


def offered(*words: str) -> list[str]:
    """What completes the last word; `file` where the shell is to look itself."""
    machine = ShellComplete(heterps, {}, "heterps", "_HETERPS_COMPLETE")
    found = machine.get_completions(list(words[:-1]), words[-1])
    return [one.value if one.type == "plain" else one.type for one in found]


@pytest.fixture
def kept() -> str:
    """A job of a cluster that is gone."""
    archive.add(pb.JobStatus(job_id="clicks-aaa111", state=pb.SUCCEEDED), None, [])
    return "clicks-aaa111"


@pytest.fixture
def live(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A job of a scheduler that runs; its address is in the current context."""
    with EmbeddedRedis(tmp_path) as server:
        store = Store(server.url)
        status = pb.JobStatus(
            job_id="live-ccc333", name="live", state=pb.SUCCEEDED, submitted_at=time.time()
        )
        store.submit(status, JobSpec())
        store.close()
        process = SchedulerProcess("127.0.0.1:0", server.url)
        address = process.start(lambda: None)
        contexts.set_context("lab", {"scheduler": address})
        contexts.use("lab")
        yield status.job_id
        process.stop()


@pytest.fixture
def deaf() -> Iterator[str]:
    """An address where connections are taken and nothing is ever said."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


def test_commands_and_options_are_offered() -> None:
    assert offered("cont") == ["context"]
    assert {"train", "context", "completion"} <= set(offered(""))
    assert offered("ps", "st") == ["stats"]
    assert offered("context", "") == ["list", "remove", "set", "show", "use"]
    assert "--follow" in offered("logs", "--f")
    assert offered("jobs", "--cont") == ["--context"]
    assert offered("completion", "z") == ["zsh"]
    assert "train" in offered("trian", ""), "click's way; no error"


def test_no_command_is_imported_to_offer_commands() -> None:
    script = (
        "import sys, heterps.cli as c; from click.shell_completion import ShellComplete;"
        "found = ShellComplete(c.heterps, {}, 'heterps', 'X').get_completions([], 'st');"
        "print([one.value for one in found]);"
        "print([m for m in sys.modules if m.startswith('heterps.commands.') or m == 'grpc'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines() == ["['status']", "[]"]


def test_jobs_are_offered_for_commands_that_take_one(kept: str, live: str) -> None:
    for command in ("inspect", "logs", "cancel", "replan"):
        assert offered(command, "") == [live, kept]
        assert offered(command, "liv") == [live]
    assert offered("diff", "cl") == [kept]
    assert offered("diff", kept, "liv") == [live]
    assert offered("diff", "./no-job") == ["file"]


def test_the_cluster_that_the_line_names_is_asked(kept: str, live: str) -> None:
    assert offered("logs", "--scheduler", "127.0.0.1:1", "") == [kept]
    assert offered("logs", "--context", "local", "") == [kept]
    assert offered("logs", "--context", "lab", "") == [live, kept]


def test_a_cluster_that_is_away_or_silent_is_passed_over(
    kept: str, deaf: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert offered("logs", "") == [kept]
    assert offered("logs", "--scheduler", "no port", "") == [kept]
    assert offered("logs", "--scheduler", deaf, "") == [kept], "it does not wait for ever"
    contexts.path().write_text("contexts: [")
    assert offered("logs", "") == [kept]
    assert offered("context", "use", "") == ["local"]
    assert capfd.readouterr() == ("", "")


def test_contexts_and_files_are_offered() -> None:
    for name in ("prod", "pre"):
        contexts.set_context(name, {"scheduler": "h:1"})
    assert offered("context", "use", "") == ["local", "pre", "prod"]
    assert offered("status", "--context", "pro") == ["prod"]
    assert offered("submit", "jo") == ["file"]
    assert offered("ps", "save", "back") == ["file"]
    assert offered("context", "set", "x", "--ca", "") == ["file"]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_of_the_shell(run: Run, shell: str) -> None:
    code, out, _ = run("completion", shell)
    assert code == OK
    assert f"_HETERPS_COMPLETE={shell}_complete" in out
    code, out, _ = run("completion", "--help")
    assert f"heterps completion {shell} >" in out


def test_another_shell_is_refused(run: Run) -> None:
    code, _, err = run("completion", "csh")
    assert code == USAGE
    assert "'fish'" in err


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
def test_bash_completes(tmp_path: Path, live: str) -> None:
    command = tmp_path / "bin" / "heterps"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m heterps "$@"\n')
    command.chmod(0o755)
    script = """
        eval "$(heterps completion bash)"
        COMP_WORDS=(heterps cont) COMP_CWORD=1
        _heterps_completion heterps cont heterps
        echo "${COMPREPLY[@]}"
        COMPREPLY=() COMP_WORDS=(heterps logs li) COMP_CWORD=2
        _heterps_completion heterps li logs
        echo "${COMPREPLY[@]}"
        complete -p heterps
    """
    environment = {
        **os.environ,
        "PATH": f"{command.parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment,
    )
    first, second, registered = done.stdout.splitlines()
    assert (first, second) == ("context", live)
    assert "_heterps_completion heterps" in registered
    assert done.stderr == ""
