"""A console process for tests, and requests as a browser or somebody worse would send them."""

import http.client
import json
import ssl
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlencode

from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]
_READY_S = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    headers: Mapping[str, str]
    text: str


@dataclass(frozen=True, slots=True)
class Console:
    address: str
    url: str
    tls: ssl.SSLContext | None = None

    def ask(
        self,
        path: str,
        method: str = "GET",
        form: Mapping[str, str] | None = None,
        source: str = "",
        **headers,
    ):
        """One request; header names with `_` for `-`.

        Args:
            source: address of loopback to come from.
        """
        host, _, port = self.address.rpartition(":")
        connection = http.client.HTTPConnection(
            host, int(port), timeout=60, source_address=(source, 0) if source else None
        )
        if self.tls is not None:
            connection = http.client.HTTPSConnection(
                "127.0.0.1", int(port), timeout=60, context=self.tls
            )
        headers.setdefault("host", f"{host}:{port}")
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        body = urlencode(form) if form is not None else None
        if body is not None:
            sent["content-type"] = "application/x-www-form-urlencoded"
        try:
            connection.request(method, path, body, sent)
            reply = connection.getresponse()
            found = {name.lower(): value for name, value in reply.getheaders()}
            return Answer(reply.status, found, reply.read().decode())
        finally:
            connection.close()


@contextmanager
def console(
    scheduler: str,
    directory: Path,
    *,
    bind: str = "127.0.0.1:0",
    tls: ssl.SSLContext | None = None,
) -> Iterator[Console]:
    ready, log = directory / "console.ready.json", directory / "console.log"
    argv = [sys.executable, "-m", "heterps", "console", "--scheduler", scheduler]
    argv += ["--bind", bind, "--ready-file", str(ready)]
    with log.open("wb") as output:
        process = subprocess.Popen(argv, stdout=output, stderr=output, cwd=ROOT)
    try:
        wait_until(lambda: ready.exists() or process.poll() is not None, log.read_text, _READY_S)
        assert process.poll() is None, log.read_text()
        facts = json.loads(ready.read_text())
        yield Console(facts["address"], facts["url"], tls)
    finally:
        process.terminate()
        assert process.wait(20) == 0
        assert "Traceback" not in log.read_text()
