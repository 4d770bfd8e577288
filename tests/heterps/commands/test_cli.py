"""The command line: exit codes, messages without a traceback, and a quick start."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from heterps.client import archive
from heterps.client.records import LogText
from heterps.errors import INFEASIBLE, OK, UNREACHABLE, USAGE
from protos import scheduler_pb2 as pb

ROOT = Path(__file__).resolve().parents[3]
PLAN = [str(ROOT / "examples/plan/workload.yaml")]
PLAN += ["--resources", str(ROOT / "examples/plan/resources.yaml")]


@pytest.fixture
def kept():
    """A job that `train` ran on a cluster that is gone."""
    status = pb.JobStatus(job_id="clicks-aaa111", name="clicks", state=pb.SUCCEEDED)
    archive.add(status, None, [LogText("stage-0", "hello\nworld\n")])
    return status.job_id


def test_help_is_quick_and_complete():
    started = time.monotonic()
    argv = [sys.executable, "-m", "heterps", "--help"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True, cwd=ROOT)
    took = time.monotonic() - started
    for name in ("train", "plan", "up", "inspect", "certs", "Exit codes:", "130"):
        assert name in done.stdout
    assert took < 2.0, "0.2 s on an idle machine"


def test_help_imports_nothing_heavy():
    script = (
        "import sys; from heterps.cli import main; main(['--help']);"
        "print([m for m in ('torch', 'numpy', 'grpc', 'rich', 'yaml') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "name",
    [
        *("train", "profile", "plan", "policy", "up", "down", "status", "submit", "jobs"),
        *(
            "decisions",
            "inspect",
            "diff",
            "replan",
            "logs",
            "cancel",
            "context",
            "completion",
            "certs",
        ),
    ],
)
def test_every_command_has_help(run, name):
    code, out, _ = run(name, "--help")
    assert code == OK
    assert "Usage: heterps" in out


@pytest.mark.parametrize("room", ["scheduler", "ps", "node"])
def test_rooms_parse_their_own_arguments(run, room):
    assert run(room, "--help")[0] == OK
    assert run(room, "--no-such-option")[0] == USAGE


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian", "job.yaml"], "Did you mean train?"),
        (["train"], "Missing argument"),
        (["train", "no-such-file.yaml"], "no-such-file.yaml"),
        (["plan", "no-such-file.yaml", "--resources", "r.yaml"], "no-such-file.yaml"),
        (["plan", *PLAN, "--method", "magic"], "magic"),
        (["plan", *PLAN, "--min-throughput", "fast"], "fast"),
        (["plan", *PLAN, "--pin", "tower"], "expected LAYER=TYPE"),
        (["plan", *PLAN, "--pin", "no_such_layer=cpu", "--method", "greedy"], "no_such_layer"),
        (["up", "--emulate", "t4=zero"], "expected TYPE or TYPE=N"),
        (["up", "--units", "0"], "0"),
    ],
)
def test_wrong_usage_exits_with_2(run, arguments, said):
    code, _, err = run(*arguments)
    assert code == USAGE
    assert said in err


def test_a_wrong_job_file_exits_with_2(run, job):
    code, _, err = run("train", str(job), "--set", "train.epocs=3")
    assert code == USAGE
    assert "did you mean train.epochs?" in err


def test_missing_data_exits_with_2(run, job):
    code, _, err = run("train", str(job), "--set", "data.train=absent.csv")
    assert code == USAGE
    assert "absent.csv" in err


def test_a_failing_prepare_exits_with_2_and_shows_why(run, job):
    text = "def prepare(path):\n    print('fetching')\n    raise OSError('disk full')\n"
    job.with_name("prepare.py").write_text(text)
    code, out, err = run("train", str(job), "--set", "data.prepare=prepare.py:prepare")
    assert code == USAGE
    assert "fetching" in out
    assert "disk full" in err


@pytest.mark.parametrize(
    "arguments", [["jobs"], ["status"], ["inspect"], ["logs"], ["cancel"], ["inspect", "x"]]
)
def test_no_cluster_exits_with_4_and_says_what_to_type(run, arguments):
    code, _, err = run(*arguments)
    assert code == UNREACHABLE
    assert "heterps up" in err


def test_nobody_listening_is_named(run, monkeypatch, job):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    monkeypatch.setenv("HETERPS_SCHEDULER", address)
    for arguments in (["jobs"], ["submit", str(job)], ["cancel", "x"]):
        code, _, err = run(*arguments)
        assert code == UNREACHABLE
        assert address in err


def test_status_says_down_in_json(run):
    code, out, _ = run("status", "--json")
    assert code == UNREACHABLE
    assert json.loads(out)["up"] is False


def test_down_without_a_cluster_is_fine(run):
    assert run("down")[:2] == (OK, "no cluster is up\n")


def test_plan_prints_a_report(run):
    code, out, _ = run("plan", *PLAN, "--method", "greedy", "--min-throughput", "100000")
    assert code == OK
    for word in ("Plan", "Why", "Alternatives", "user_embedding", "samples/s"):
        assert word in out
    assert "\x1b" not in out


def test_plan_prints_the_contract_as_json(run):
    code, out, _ = run("plan", *PLAN, "--method", "exact", "--json", "--seed", "7")
    decision = json.loads(out)
    assert code == OK
    contract = {
        *("method", "feasible", "reason", "assignment", "stages", "ps_units", "throughput"),
        *("price_per_hour", "cost", "lower_bound", "gap", "seconds", "alternatives", "seed"),
    }
    assert contract <= decision.keys()
    assert decision["seed"] == 7
    assert {"first", "last", "type", "units"} <= decision["stages"][0].keys()
    assert len(decision["assignment"]) == 10


def test_an_infeasible_plan_exits_with_5(run):
    code, out, _ = run("plan", *PLAN, "--method", "greedy", "--min-throughput", "1e12")
    assert code == INFEASIBLE
    assert "1,000,000,000,000" in out


def test_plan_pins(run):
    code, out, _ = run(
        "plan", *PLAN, "--method", "greedy", "--pin", "experts=t4", "--pin", "loss=t4", "--json"
    )
    assert code == OK
    assignment = json.loads(out)["assignment"]
    assert (assignment[6], assignment[9]) == ("t4", "t4")


def test_jobs_of_clusters_that_are_gone_are_still_known(run, kept):
    code, out, _ = run("jobs")
    assert (code, kept in out) == (OK, True)
    assert run("logs")[:2] == (OK, "stage-0 | hello\nstage-0 | world\n")
    code, out, _ = run("inspect", "clicks", "--json")
    assert json.loads(out)["state"] == "succeeded"
    assert json.loads(out)["decision"] is None
    code, _, err = run("inspect", "other")
    assert code == UNREACHABLE
    assert "'other'" in err


def test_a_reader_that_leaves_is_no_error():
    argv = f"{sys.executable} -m heterps --help | head -1; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(
        ["bash", "-c", argv], check=False, capture_output=True, text=True, cwd=ROOT
    )
    assert done.returncode == OK
    assert done.stderr == ""
