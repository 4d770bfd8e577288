"""Certificates: private files that a real server and client accept, and nobody else."""

import stat

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chassis.security import Security
from chassis.servers import Server
from heterps import cli
from heterps.client.client import Client
from heterps.errors import HeterpsError, UnreachableError
from heterps.home import certs
from protos.scheduler_pb2 import ListNodesReply
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server


class _Scheduler(SchedulerServicer):
    def ListNodes(self, request, context):
        return ListNodesReply()


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A scheduler with TLS and a token, on an address that would be refused without."""
    for name, value in certs.make(tmp_path / "certs", ["scheduler"]).items():
        monkeypatch.setenv(name, value)
    server = Server("scheduler", "0.0.0.0:0")
    server.add(add_SchedulerServicer_to_server, _Scheduler(), "heterps.v1.Scheduler")
    address = server.start().replace("0.0.0.0", "127.0.0.1")
    yield address
    server.stop(0.1)


def test_files_are_the_owners_alone(tmp_path):
    folder = tmp_path / "certs"
    environment = certs.make(folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert sorted(path.name for path in folder.iterdir()) == sorted(certs.FILES)
    for path in folder.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert len((folder / certs.TOKEN).read_text().strip()) >= 32
    assert set(environment) == {
        "HETERPS_TLS_CA",
        "HETERPS_TLS_CERT",
        "HETERPS_TLS_KEY",
        "HETERPS_TOKEN_FILE",
    }


def test_a_server_and_a_client_meet_over_them(served):
    with Client(served) as client:
        assert client.nodes() == []


def test_the_clusters_name_stands_in_for_any_host(served, monkeypatch):
    address = served.replace("127.0.0.1", "127.0.0.2")  # which is not in the certificate
    with Client(address) as client, pytest.raises(UnreachableError):
        client.nodes()
    monkeypatch.setenv("HETERPS_TLS_NAME", certs.CLUSTER)
    with Client(address) as client:
        assert client.nodes() == []
    monkeypatch.setenv("HETERPS_TLS_NAME", "another.cluster")
    with Client(served) as client, pytest.raises(UnreachableError):
        client.nodes()


def test_a_wrong_token_is_refused_with_what_to_do(served, tmp_path, monkeypatch):
    token = tmp_path / "token"
    token.write_text("x" * 32)
    monkeypatch.setenv("HETERPS_TOKEN_FILE", str(token))
    with Client(served) as client, pytest.raises(HeterpsError, match="HETERPS_TOKEN_FILE"):
        client.nodes()


def test_another_authority_is_not_trusted(served, tmp_path, monkeypatch):
    certs.make(tmp_path / "other")
    monkeypatch.setenv("HETERPS_TLS_CA", str(tmp_path / "other" / certs.CA))
    with Client(served) as client, pytest.raises(UnreachableError):
        client.nodes()


def test_no_tls_is_answered_with_a_hint(served, monkeypatch):
    for name in ("CA", "CERT", "KEY"):
        monkeypatch.delenv(f"HETERPS_TLS_{name}")
    with Client(served) as client, pytest.raises(UnreachableError, match="HETERPS_TLS_CA"):
        client.nodes()


def test_health_needs_no_token(served, tmp_path, monkeypatch):
    monkeypatch.delenv("HETERPS_TOKEN_FILE")
    channel = Security.from_environment().channel(served, [])
    reply = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=5)
    assert reply.status == health_pb2.HealthCheckResponse.SERVING
    channel.close()


def test_names_are_in_the_certificate(served):
    options = [("grpc.ssl_target_name_override", "scheduler")]
    channel = Security.from_environment().channel(served, options)
    grpc.channel_ready_future(channel).result(5)
    channel.close()


def test_the_command_replaces_only_when_told(tmp_path, capsys):
    folder = str(tmp_path / "certs")
    assert cli.main(["certs", folder, "--host", "scheduler"]) == 0
    assert f"export HETERPS_TLS_CA={folder}" in capsys.readouterr().out
    before = (tmp_path / "certs" / certs.TOKEN).read_text()
    assert cli.main(["certs", folder]) == 2
    assert "--force" in capsys.readouterr().err
    assert cli.main(["certs", folder, "--if-missing"]) == 0
    assert (tmp_path / "certs" / certs.TOKEN).read_text() == before
    assert cli.main(["certs", folder, "--force"]) == 0
    assert (tmp_path / "certs" / certs.TOKEN).read_text() != before
    assert cli.main(["certs", str(tmp_path / "x"), "--host", "bad host\u00e9"]) == 2
