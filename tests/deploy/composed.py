"""The compose project of a test, and its client: outside the containers, beside the engine."""

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.deploy.engine import DEPLOY, ROOT, Engine
from tests.waiting import wait_until

WAIT_S = 900.0  # machines may be busy; nothing is judged by it


class Composed:
    """Docker Compose on the deployment's own file, with every setting of ours in `folder`.

    Args:
        folder: for secrets, what clients and containers share, and the client's own home.
        image: of the roles.
    """

    def __init__(self, engine: Engine, folder: Path, image: str) -> None:
        self.engine = engine
        self.shared = folder / "shared"
        self.secrets = folder / "secrets"
        self.runs = self.shared / "runs"
        self.runs.mkdir(parents=True)
        self.runs.chmod(0o777)  # containers have a user of their own
        shutil.copytree(ROOT / "examples/flights", self.shared / "flights")
        self._settings = {
            "IMAGE": image,
            "PROMETHEUS_IMAGE": "prom/prometheus:standin",
            "SECRETS": str(self.secrets),
            "SHARED": str(self.shared),
        }
        self._client = {"HETERPS_HOME": str(folder / "home"), "PYTHONPATH": str(ROOT)}

    def make_secrets(self) -> str:
        """What the operator does first."""
        return self.engine.run([DEPLOY / "secrets.sh"], env=self._settings)

    def compose(self, *arguments: str, check: bool = True) -> str:
        """`docker compose ...`, as typed in deploy/."""
        argv = ["docker", "compose", *arguments]
        return self.engine.run(argv, cwd=DEPLOY, env=self._settings, check=check)

    def up(self, *arguments: str) -> None:
        """Up, and healthy; where that fails, with the logs."""
        try:
            self.compose("up", "--wait", "--no-build", *arguments)
        except AssertionError as error:
            logs = self.compose("logs", "--tail=30", check=False)
            raise AssertionError(f"{error}\n{self.compose('ps', '-a')}\n{logs}") from None

    def containers(self) -> dict[str, dict[str, Any]]:
        """What the engine knows of each container, by its name."""
        ids = self.compose("--profile", "monitoring", "ps", "--all", "--quiet").split()
        found = json.loads(self.engine.docker("inspect", *ids)) if ids else []
        return {one["Name"].lstrip("/"): one for one in found}

    def kill(self, name: str) -> None:
        """End a container as the kernel does when memory runs out; nobody asked it to stop.

        (`docker kill` would count as the operator's wish, and be left at that.) Returns when the
        engine has started it again and it is healthy.
        """
        before = self.containers()[name]
        os.kill(before["State"]["Pid"], signal.SIGKILL)

        def is_back() -> bool:
            now = self.containers()[name]
            restarted = now["RestartCount"] > before["RestartCount"]
            return restarted and now["State"].get("Health", {}).get("Status") == "healthy"

        wait_for(is_back, f"{name} to be started again")

    def client_argv(self, *arguments: str) -> list[str]:
        """The command line of this checkout, where the published port is."""
        target = ["nsenter", "--target", str(self.engine.pid), "--net"]
        return [*target, sys.executable, "-m", "heterps", *arguments]

    def heterps(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        """What the client prints."""
        return self.engine.run(self.client_argv(*arguments), env={**self._client, **(env or {})})

    def heterps_fails(self, *arguments: str, env: dict[str, str] | None = None) -> str:
        """What it prints when it must not succeed."""
        environment = {**self.engine.environment, **self._client, **(env or {})}
        done = subprocess.run(
            self.client_argv(*arguments),
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        assert done.returncode != 0, done.stdout
        return done.stdout

    def started(self, log: Path, *arguments: str) -> "subprocess.Popen[bytes]":
        """The client, still running, its output in a file."""
        with log.open("wb") as output:
            return subprocess.Popen(
                self.client_argv(*arguments),
                env={**self.engine.environment, **self._client},
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def job(self, job_id: str) -> dict[str, Any]:
        """A job as `heterps jobs` tells it; empty before there is one."""
        jobs = json.loads(self.heterps("jobs", "--json"))
        return next((job for job in jobs if job["job_id"] == job_id), {})

    def nodes(self) -> list[dict[str, Any]]:
        """Nodes and standing shards, as `heterps status` tells them."""
        found: list[dict[str, Any]] = json.loads(self.heterps("status", "--json"))["nodes"]
        return found


def wait_for(condition: Callable[[], bool], what: str, seconds: float = WAIT_S) -> None:
    """Ask until it is so, not too often: each look starts processes."""
    wait_until(condition, what, seconds, pause_s=0.3)
