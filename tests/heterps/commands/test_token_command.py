"""heterps token: tokens are made, listed, used and revoked as a person would."""

import json
import stat

import pytest

from tests.secured import Secured


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with Secured(tmp_path_factory.mktemp("tokens")) as running:
        yield running


@pytest.fixture
def root(cluster, monkeypatch):
    for name, value in cluster.files.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HETERPS_SCHEDULER", cluster.scheduler.address)


def test_a_token_is_made_used_and_taken_back(root, run, tmp_path, monkeypatch):
    file = tmp_path / "anna.token"
    arguments = ("token", "create", "anna", "--role", "submit", "--expires", "30d")
    code, out, _ = run(*arguments, "--to", str(file))
    assert (code, out.strip()) == (0, f"token anna (submit) is in {file}")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    secret = file.read_text().strip()
    assert secret not in out
    code, _, err = run(*arguments, "--to", str(file))
    assert (code, "is there already" in err) == (2, True)
    code, _, err = run(*arguments)
    assert (code, "token anna: there is one" in err) == (2, True)

    code, out, _ = run("token", "list", "--json")
    (listed,) = json.loads(out)
    assert (listed["name"], listed["role"], listed["created_by"]) == ("anna", "submit", "root")
    assert listed["expires_at"] - listed["created_at"] == pytest.approx(30 * 86400)
    assert "anna" in run("token", "list")[1]

    monkeypatch.setenv("HETERPS_TOKEN_FILE", str(file))
    assert run("jobs")[:2] == (0, "no jobs yet; submit one with `heterps submit JOB.yaml`\n")
    code, _, err = run("token", "create", "bob", "--role", "operate")
    assert code == 2
    assert "needs the role cluster; this token's is submit" in err
    assert "heterps token create" in err, "what to type"


def test_a_revoked_token_is_said_to_be_refused(root, cluster, run, tmp_path, monkeypatch):
    file = tmp_path / "carol.token"
    assert run("token", "create", "carol", "--role", "read", "--to", str(file))[0] == 0
    assert run("token", "revoke", "carol")[1] == "token carol is revoked\n"
    code, out, _ = run("token", "revoke", "carol", "--json")
    assert (code, json.loads(out)) == (2, {"name": "carol", "revoked": False})
    monkeypatch.setenv("HETERPS_TOKEN_FILE", str(file))
    code, _, err = run("jobs")
    assert code == 2
    assert "it was revoked or has expired" in err


def test_a_secret_is_printed_where_no_file_is_named(root, run):
    code, out, _ = run("token", "create", "dave", "--role", "read")
    assert (code, len(out.strip()) > 40) == (0, True)
    code, out, _ = run("token", "create", "erin", "--role", "read", "--json")
    assert len(json.loads(out)["secret"]) > 40
    assert run("token", "create", "x", "--role", "cluster")[0] == 2
    assert run("token", "create", "x", "--role", "read", "--expires", "soon")[0] == 2
