"""Who is let in: tokens, certificates, Redis, root; and a cluster all of whose parts speak TLS."""

import datetime
import os
import pwd
import shutil
import socket
import ssl
import subprocess
import sys
import threading
from concurrent import futures
from contextlib import ExitStack, suppress
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization

from chassis.process import module_argv, spawn
from chassis.security import Security, SecurityError
from chassis.servers import Server
from heterps import Client
from heterps.errors import HeterpsError, UnreachableError
from heterps.home import certs
from protos.scheduler_pb2 import ListNodesReply
from protos.scheduler_pb2_grpc import SchedulerServicer, add_SchedulerServicer_to_server
from scheduler.state.redis_server import EmbeddedRedis
from scheduler.state.redis_tls import options, require
from scheduler.state.store import Store, StoreError
from tests.cluster import Roles
from tests.jobs import CLICKS_LAYERS, write_clicks, write_workload
from tests.waiting import wait_until

HERE, THERE = "127.0.0.1", "127.0.0.2"  # two hosts, as far as names go; certificates name the first


class Answers(SchedulerServicer):
    def ListNodes(self, request, context):
        return ListNodesReply()


def trust(monkeypatch, folder):
    for name, value in certs.environment(folder).items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def ours(tmp_path, monkeypatch):
    """The cluster's files, in the environment."""
    certs.make(tmp_path / "ours")
    trust(monkeypatch, tmp_path / "ours")
    return tmp_path / "ours"


@pytest.fixture
def port(ours):
    server = Server("scheduler", "0.0.0.0:0")
    server.add(add_SchedulerServicer_to_server, Answers(), "heterps.v1.Scheduler")
    yield server.start().rpartition(":")[2]
    server.stop(0.1)


def expired(folder, days_ago=2):
    """Make files whose certificate was valid until some days ago."""
    certs.make(folder)
    key = serialization.load_pem_private_key((folder / certs.KEY).read_bytes(), None)
    valid = x509.load_pem_x509_certificate((folder / certs.CERTIFICATE).read_bytes())
    end = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days_ago)
    builder = (
        x509.CertificateBuilder()
        .subject_name(valid.subject)
        .issuer_name(valid.subject)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(end - datetime.timedelta(days=9))
        .not_valid_after(end)
    )
    for extension in valid.extensions:
        builder = builder.add_extension(extension.value, extension.critical)
    old = builder.sign(key, valid.signature_hash_algorithm)
    for name in (certs.CERTIFICATE, certs.CA):
        (folder / name).write_bytes(old.public_bytes(serialization.Encoding.PEM))
    return folder


def refusal(address, kind=UnreachableError):
    with Client(address) as client, pytest.raises(kind) as caught:
        client.nodes()
    return str(caught.value)


def test_a_tampered_token_is_refused(port, ours, tmp_path, monkeypatch):
    token = (ours / certs.TOKEN).read_text()
    for wrong in ("A" * 40, token.strip()[:-1], token.strip() + "x"):
        (tmp_path / "token").write_text(wrong)
        monkeypatch.setenv("HETERPS_TOKEN_FILE", str(tmp_path / "token"))
        assert "token is missing or wrong" in refusal(f"{HERE}:{port}", HeterpsError)
    monkeypatch.delenv("HETERPS_TOKEN_FILE")
    assert "token is missing or wrong" in refusal(f"{HERE}:{port}", HeterpsError)


def test_another_authority_is_refused_with_the_reason(port, tmp_path, monkeypatch):
    certs.make(tmp_path / "other")
    monkeypatch.setenv("HETERPS_TLS_CA", str(tmp_path / "other" / certs.CA))
    assert "not of the authority in HETERPS_TLS_CA" in refusal(f"{HERE}:{port}")


def test_a_host_that_the_certificate_does_not_name_is_refused_with_the_reason(port):
    assert "does not name this host" in refusal(f"{THERE}:{port}")


def test_an_expired_certificate_is_refused_with_the_reason(tmp_path, monkeypatch):
    folder = expired(tmp_path / "old")
    trust(monkeypatch, folder)
    with pytest.raises(SecurityError, match="HETERPS_TLS_CERT: the certificate has expired on 20"):
        Server("scheduler", "127.0.0.1:0").start()
    pair = ((folder / certs.KEY).read_bytes(), (folder / certs.CERTIFICATE).read_bytes())
    server = grpc.server(futures.ThreadPoolExecutor(1))  # one whose certificate expired as it ran
    bound = server.add_secure_port(f"{HERE}:0", grpc.ssl_server_credentials([pair]))
    server.start()
    assert "its certificate has expired" in refusal(f"{HERE}:{bound}")
    server.stop(0)


def test_a_server_without_tls_is_not_spoken_to_where_a_ca_is_set(ours, monkeypatch):
    server = Server("scheduler", "127.0.0.1:0", security=Security())
    server.add(add_SchedulerServicer_to_server, Answers(), "heterps.v1.Scheduler")
    assert "it speaks no TLS" in refusal(server.start())
    server.stop(0.1)


# Redis


def free_port():
    with socket.socket() as probe:
        probe.bind((HERE, 0))
        return probe.getsockname()[1]


def real_server(folder, password, directory, stack):
    """A Redis or Valkey that was built with TLS; None where there is none."""
    binary = shutil.which("valkey-server") or shutil.which("redis-server")
    if binary is None:
        return None
    bound = free_port()
    argv = [binary, "-", "--port", "0", "--tls-port", str(bound), "--bind", HERE, THERE]
    argv += ["--tls-cert-file", folder / certs.CERTIFICATE, "--tls-key-file", folder / certs.KEY]
    argv += ["--tls-ca-cert-file", folder / certs.CA, "--tls-auth-clients", "no"]
    argv += ["--dir", directory, "--save", ""]
    server = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
    stack.callback(server.wait)
    stack.callback(server.kill)
    server.stdin.write(f"requirepass {password}\n".encode())
    server.stdin.close()

    def listens():
        with suppress(OSError), socket.create_connection((HERE, bound), timeout=1):
            return True
        return server.poll() is not None

    wait_until(listens, "Redis listens")
    return bound if server.poll() is None else None  # it was built without


def front(folder, behind, stack):
    """TLS before a server that has none, as a proxy would be."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / certs.CERTIFICATE, folder / certs.KEY)
    listener = stack.enter_context(socket.create_server(("0.0.0.0", 0)))

    def copy(source, target):
        with suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def serve(plain):
        with suppress(OSError):
            outer = context.wrap_socket(plain, server_side=True)
            inner = socket.create_connection((HERE, behind))
            for pair in ((outer, inner), (inner, outer)):
                threading.Thread(target=copy, args=pair, daemon=True).start()

    def accept():
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listener.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    return listener.getsockname()[1]


@pytest.fixture(params=["server", "front"])
def secret_redis(request, ours, tmp_path):
    """(port, password) of a Redis behind TLS, whose certificate is the cluster's."""
    with ExitStack() as stack:
        if request.param == "server":
            password = "p" * 32
            (tmp_path / "redis").mkdir()
            bound = real_server(ours, password, tmp_path / "redis", stack)
            if bound is None:
                pytest.skip("no redis-server or valkey-server with TLS is installed")
        else:
            url = stack.enter_context(EmbeddedRedis(tmp_path / "redis")).url
            head, _, behind = url.rpartition("@")
            password = head.rpartition(":")[2]
            bound = front(ours, int(behind.partition("/")[0].rpartition(":")[2]), stack)
        yield bound, password


def test_redis_is_trusted_by_its_certificate_and_opens_with_the_password(
    secret_redis, tmp_path, monkeypatch
):
    bound, password = secret_redis
    Store(f"rediss://:{password}@{HERE}:{bound}/0").ping()
    with pytest.raises(StoreError, match=f"redis {HERE}:{bound}: .*(?i:password|auth)"):
        Store(f"rediss://:wrong@{HERE}:{bound}/0").ping()
    with pytest.raises(StoreError, match="IP address mismatch"):
        Store(f"rediss://:{password}@{THERE}:{bound}/0").ping()
    certs.make(tmp_path / "other")
    monkeypatch.setenv("HETERPS_TLS_CA", str(tmp_path / "other" / certs.CA))
    with pytest.raises(StoreError, match="CERTIFICATE_VERIFY_FAILED"):
        Store(f"rediss://:{password}@{HERE}:{bound}/0").ping()
    with pytest.raises(StoreError):
        Store(f"redis://:{password}@{HERE}:{bound}/0", timeout_s=1).ping()


def test_a_scheduler_works_on_a_redis_behind_tls(secret_redis, tmp_path):
    bound, password = secret_redis
    environment = {"HETERPS_REDIS": f"rediss://:{password}@{HERE}:{bound}/0"}
    with Roles(tmp_path) as roles:
        argv = ("--bind", "0.0.0.0:0", "--advertise", HERE)
        child = roles.start("scheduler.service", *argv, **environment)
        with Client(child.address) as client:
            assert client.jobs() == []
        assert password not in child.log.read_text()
        assert password not in Path(f"/proc/{child.pid}/cmdline").read_text()


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("redis://:secret@redis.example:6379/0", "expected rediss://"),
        ("rediss://redis.example:6379/0", "expected rediss://:PASSWORD@redis.example"),
    ],
)
def test_a_redis_of_another_host_needs_tls_and_a_password(url, why, tmp_path):
    with pytest.raises(SecurityError, match=why):
        require(url)
    require(url, allow_plain=True)
    done = subprocess.run(
        module_argv("scheduler.service", "--redis", url),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, why in done.stderr, "secret" in done.stderr) == (1, True, False)


def test_what_a_redis_url_says_itself_counts():
    for plain in ("", "redis://127.0.0.1:1/0", "unix:///tmp/x"):
        require(plain)
        assert options(plain) == {}
    environment = {"HETERPS_TLS_CA": "ca.pem"}
    assert options("rediss://h:1/0", environment)["ssl_ca_certs"] == "ca.pem"
    assert "ssl_ca_certs" not in options("rediss://h:1/0?ssl_ca_certs=own.pem", environment)


def test_our_own_redis_has_a_password_that_only_we_can_read(tmp_path):
    with EmbeddedRedis(tmp_path) as server:
        Store(server.url).ping()
        with pytest.raises(StoreError, match=r"(?i)auth"):
            Store("redis://" + server.url.rpartition("@")[2]).ping()
        password = server.url.partition("@")[0].rpartition(":")[2]
        assert password not in Path(f"/proc/{server.pid}/cmdline").read_text()
        written = [
            p for p in tmp_path.rglob("*") if p.is_file() and password in p.read_text("latin-1")
        ]
        assert [p.stat().st_mode & 0o077 for p in written] == [0]


# Root


def node(tmp_path, *arguments):
    argv = module_argv("workers.node", "--type", "cpu", "--units", "1", *arguments)
    return spawn("node", argv, directory=tmp_path / "logs")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_does_not_run_jobs_of_other_machines(ours, tmp_path):
    child = node(tmp_path, "--scheduler", f"{HERE}:1", "--bind", "0.0.0.0:0")
    assert child.process.wait(60) == 1
    assert "refusing to run jobs as root at 0.0.0.0" in child.log.read_text()
    child = node(tmp_path, "--scheduler", f"{HERE}:1", "--user", "nobody-of-this-name")
    assert child.process.wait(60) == 1
    assert "--user nobody-of-this-name: unknown here" in child.log.read_text()


BECOMES = """
import os
from workers.node import privileges
privileges.settle("nobody", "0.0.0.0", False)
print(*os.getresuid(), *os.getresgid(), os.environ["USER"])
try:
    os.setuid(0)
except PermissionError:
    print("for good")
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_root_becomes_the_user_that_is_named_for_good():
    done = subprocess.run(
        [sys.executable, "-c", BECOMES], capture_output=True, text=True, check=True
    )
    account = pwd.getpwnam("nobody")
    ids = [str(account.pw_uid)] * 3 + [str(account.pw_gid)] * 3
    assert done.stdout.split("\n")[:2] == [" ".join([*ids, "nobody"]), "for good"]


# All of it together

JOB = """\
name: clicks
model: {entry: model.py:build, args: {pause_s: 0.03}}
data: {train: train.csv, valid: train.csv, label: y, dense: [x], sparse: [a, b]}
train: {epochs: 5, batch_size: 256, loss: bce_with_logits}
servers: {shards: 2}
schedule:
  {resources: resources.yaml, workload: workload.yaml, method: exact, min_throughput: 300000,
   pin: {embedding: cpu, tower: cpu, wide: v100}}
output: output
"""


def written(folder):
    write_clicks(folder)
    seconds = {"cpu": 1e-3, "v100": 8e-4}
    write_workload(folder / "workload.yaml", CLICKS_LAYERS, seconds, parallel_compute=1.0)
    path = folder / "job.yaml"
    path.write_text(JOB)
    return path


def descendants(pid):
    found = [pid]
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(OSError):
            for child in task.read_text().split():
                found += descendants(int(child))
    return found


def command(pid):
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


MAPPED = "0000000000000000FFFF0000"  # an IPv4 address on a socket of IPv6


def listening(pids):
    """(address in hex, port) of the listening sockets of processes."""
    inodes = set()
    for pid in pids:
        with suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = os.readlink(descriptor)
                    if target.startswith("socket:["):
                        inodes.add(target[8:-1])
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and words[9] in inodes:
                host, _, number = words[1].rpartition(":")
                found.add((host.removeprefix(MAPPED), int(number, 16)))
    return found


def test_every_part_of_a_cluster_speaks_tls_even_sums_among_hosts(tmp_path, monkeypatch):
    certs.make(tmp_path / "certs", [THERE])
    trust(monkeypatch, tmp_path / "certs")
    with Roles(tmp_path) as roles:
        scheduler = roles.scheduler("--bind", f"{HERE}:0")
        nodes = [
            roles.node(scheduler, "cpu", "--units", "2", "--bind", f"{HERE}:0"),
            roles.node(scheduler, "cpu", "--units", "2", "--bind", f"{THERE}:0"),
            roles.node(scheduler, "v100", "--emulate", "--bind", f"{HERE}:0"),
        ]
        with Client(scheduler.address) as client:
            wide = client.submit(written(tmp_path))

            def trains():
                status = client.status(wide)
                assert status.state != "failed", status.reason
                return status.step

            wait_until(trains, "it trains")
            pids = [pid for node in nodes for pid in descendants(node.pid)]
            stages = [
                [p for p in descendants(n.pid) if "workers.stage\0" in command(p)] for n in nodes
            ]
            assert sorted(len(found) for found in stages[:2]) == [1, 2], (
                "two hosts share the first stage"
            )
            assert len(stages[2]) == 1
            sockets = listening(pids)
            assert len(sockets) >= 9, "three nodes, two shards, four stage workers"
            assert {host for host, _ in sockets} <= {"0100007F", "0200007F"}
            plain = [at for at in sockets if not shows_a_certificate(*at, tmp_path / "certs")]
            assert len(plain) <= 1, "but for the store of torch, on loopback, all speak TLS"
            wide = client.wait(wide, timeout=300)
            assert wide.state == "succeeded", wide.reason
            stages = client.decision_message(wide.job_id).stages
            assert [(s.type, s.units) for s in stages] == [("cpu", 3), ("v100", 1)]


def shows_a_certificate(host, number, folder):
    context = ssl.create_default_context(cafile=folder / certs.CA)
    context.set_alpn_protocols(["h2"])
    name = {"0100007F": HERE, "0200007F": THERE}[host]
    with (
        suppress(OSError),
        socket.create_connection((name, number), timeout=5) as plain,
        context.wrap_socket(plain, server_hostname=name) as secure,
    ):
        return secure.version() in ("TLSv1.2", "TLSv1.3")
    return False
