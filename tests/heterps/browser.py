"""A headless Chromium spoken to over a pipe, with windows of any width."""

import base64
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
_ARGUMENTS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")
_ANSWER_S = 300.0


class Browser:
    """One page of a browser of its own; ends with the `with` block."""

    def __init__(self) -> None:
        self._number = 0
        self._buffer = b""
        self._events: list[dict[str, Any]] = []
        self.console: list[str] = []

    def __enter__(self) -> "Browser":
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        # The browser expects the pipe at 3 and 4, where ours may be: move them out of the way.
        high = [os.dup(os.dup(os.dup(fd))) for fd in (to_read, to_write)]
        script = f'exec 3<&{high[0]} 4>&{high[1]}; exec "$0" "$@"'
        argv = [str(CHROMIUM), *_ARGUMENTS, "--remote-debugging-pipe"]
        argv += [f"--user-data-dir={self._profile}", "about:blank"]
        self._process = subprocess.Popen(
            ["bash", "-c", script, *argv],
            pass_fds=high,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (to_read, to_write, *high):
            os.close(fd)
        self._session = ""
        targets = self._ask("Target.getTargets")["targetInfos"]
        page = next(one["targetId"] for one in targets if one["type"] == "page")
        attached = self._ask("Target.attachToTarget", targetId=page, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self._ask(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.terminate()
        self._process.wait()
        os.close(self._read)
        os.close(self._write)
        shutil.rmtree(self._profile, ignore_errors=True)

    def window(self, width: int, height: int = 900, dark: bool = False) -> None:
        """Be a window of this size, with this colour scheme, that moves nothing."""
        self._ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        features = [
            {"name": "prefers-color-scheme", "value": "dark" if dark else "light"},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self._ask("Emulation.setEmulatedMedia", features=features)

    def scripts(self, allowed: bool) -> None:
        """Whether pages may run scripts, from the next one on."""
        self._ask("Emulation.setScriptExecutionDisabled", value=not allowed)

    def open(self, url: str) -> None:
        """Go to a page and wait until it is loaded."""
        self._events.clear()
        self._ask("Page.navigate", url=url)
        self._loaded()

    def evaluate(self, script: str) -> Any:
        """The value of an expression; of a promise, what it comes to."""
        answer = self._ask(
            "Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def follow(self, script: str) -> None:
        """Do what leads to another page, and wait until that is loaded."""
        self._events.clear()
        self.evaluate(f"{script}; 0")
        self._loaded()

    def wait_for(self, script: str, within_s: float = _ANSWER_S) -> Any:
        """The value of an expression once it is true; True for an element."""
        plain = f"((found) => found instanceof Node || found)({script})"

        def told() -> str:
            return f"{script}\n{self.evaluate('document.body.innerText')}"

        return wait_until(lambda: self.evaluate(plain), told, within_s, pause_s=0.1)

    def picture(self, path: Path | None = None, whole: bool = True) -> bytes:
        """The page as PNG."""
        shot = self._ask("Page.captureScreenshot", captureBeyondViewport=whole)["data"]
        data = base64.b64decode(shot)
        if path is not None:
            path.write_bytes(data)
        return data

    def _loaded(self) -> None:
        while not any(event["method"] == "Page.loadEventFired" for event in self._events):
            self._next()

    def _ask(self, method: str, **values: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": values}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            piece = os.read(self._read, 1 << 20)
            assert piece, "the browser has ended"
            self._buffer += piece
        line, _, self._buffer = self._buffer.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._events.append(message)
            if message["method"] == "Runtime.exceptionThrown":
                self.console.append(str(message["params"]["exceptionDetails"]))
            elif message["method"] == "Log.entryAdded":
                self.console.append(message["params"]["entry"]["text"])
        return message
