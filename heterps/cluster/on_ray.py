"""Nodes on a Ray cluster: `heterps up --on ray`.

Redis and the scheduler stay where the command was typed: others must find them at one address, and
what they keep lies on that machine's disk. Each node daemon, the same program as everywhere, is
held by a Ray actor that lives in a bundle of a placement group. When a Ray node goes, Ray places
the bundle and starts the actor again on another one with room for it.

Units are resources that Ray nodes declare, such as `ray start --resources='{"heterps:cpu": 8}'`.
"""

import logging
import math
import os
import shutil
import signal
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from chassis.process import describe_exit, last_lines, module_argv, setup_logging, spawn
from chassis.security import VARIABLES, Security, is_loopback
from heterps.cluster.embedded import Cluster
from heterps.errors import ClusterError

RESOURCE = "heterps:"
_PLACED_S = 30.0
_READY_S = 90.0
_GRACE_S = 8.0
_PAUSE_S = 2.0  # before a daemon that ended is started again
_log = logging.getLogger("heterps.ray")


@dataclass(frozen=True, slots=True)
class Daemon:
    """A node daemon to be started.

    Attributes:
        type: resource type.
        units: how many of them it offers.
        emulated: whether its device is not there.
    """

    type: str
    units: int
    emulated: bool

    @property
    def takes(self) -> dict[str, float]:
        """What its actor reserves; Ray shows the actor as many GPUs as it reserves."""
        device = "CPU" if self.emulated or self.type.lower().startswith("cpu") else "GPU"
        return {f"{RESOURCE}{self.type}": self.units, device: self.units}


def daemons(
    nodes: Iterable[Mapping[str, Any]], types: Mapping[str, int], emulated: Iterable[str]
) -> list[Daemon]:
    """One daemon for each Ray node and type.

    Args:
        nodes: as `ray.nodes()` lists them.
        types: units wanted by type; empty for all that is declared.
        emulated: types without their device.

    Raises:
        ClusterError: no Ray node declares a type, or all together fewer units than are wanted.
    """
    alive = [node["Resources"] for node in nodes if node["Alive"]]
    declared: Counter[str] = Counter()
    for resources in alive:
        for name, amount in resources.items():
            if name.startswith(RESOURCE):
                declared[name.removeprefix(RESOURCE)] += math.floor(amount)
    if not types and not +declared:
        raise ClusterError(
            f"none of {len(alive)} Ray nodes declares units; expected resources named "
            f"{RESOURCE}TYPE, as of `ray start --resources='{{\"{RESOURCE}cpu\": 8}}'`"
        )
    found, without = [], frozenset(emulated)
    for name, wanted in (dict(types) or dict(+declared)).items():
        if declared[name] < wanted:
            raise ClusterError(
                f"--type {name}={wanted}: Ray nodes declare {declared[name]} units of "
                f"{RESOURCE}{name} in all; start others with `ray start "
                f"--resources='{{\"{RESOURCE}{name}\": N}}'` or ask for fewer"
            )
        left = wanted
        for resources in sorted(alive, key=lambda r: -r.get(RESOURCE + name, 0)):
            units = min(left, math.floor(resources.get(RESOURCE + name, 0)))
            if units > 0:
                found.append(Daemon(name, units, name in without))
                left -= units
    return found


class RayCluster(Cluster):
    """Redis and a scheduler here, the nodes as actors of a Ray cluster.

    Args:
        types: units by resource type; empty for all that Ray nodes declare.
        emulate: types without their device.
        bind: where the scheduler listens; the loopback is replaced by this machine's address where
            Ray has other machines.
        ray: the Ray cluster's address, "auto" for the one that this machine belongs to.

    Raises:
        ClusterError: Ray is not installed.
    """

    def __init__(
        self,
        directory: str | Path | None = None,
        types: Mapping[str, int] | None = None,
        emulate: Iterable[str] = (),
        *,
        redis_url: str | None = None,
        bind: str = "127.0.0.1:0",
        ray: str = "auto",
    ) -> None:
        self._ray = installed()
        super().__init__(directory, types or {}, emulate, redis_url=redis_url, bind=bind)
        self._address = ray
        self._host = ""  # where nodes listen; empty for each node's own address
        self._actors: list[Any] = []
        self._group: Any = None

    def stop(self) -> None:
        """End all processes, nodes first; safe to repeat."""
        actors, self._actors = self._actors, []
        if actors:
            with suppress(Exception):  # a Ray that is gone has ended them
                self._ray.wait([actor.stop.remote() for actor in actors], timeout=_GRACE_S)
        for actor in actors:
            with suppress(Exception):
                self._ray.kill(actor)
        if self._group is not None:
            with suppress(Exception):
                self._ray.util.remove_placement_group(self._group)
            self._group = None
        super().stop()
        if self._ray.is_initialized():
            self._ray.shutdown()

    def _start(self, on_step: Any) -> None:
        on_step("ray")
        self._connect()
        super()._start(on_step)

    def _connect(self) -> None:
        """Join Ray, and find out who must be able to call whom."""
        if self._address.startswith("ray://"):
            raise ClusterError(
                f"--address {self._address}: a Ray client is not enough, as nodes call the "
                "scheduler here; expected HOST:PORT or auto, on a machine of the Ray cluster"
            )
        handler = signal.getsignal(signal.SIGTERM)
        try:
            self._ray.init(
                address=self._address,
                namespace="heterps",
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
        except Exception as error:
            raise ClusterError(
                f"no Ray cluster at {self._address}: {error}\n"
                "Start one with `ray start --head`, or name its --address."
            ) from None
        finally:
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGTERM, handler)  # Ray sets its own
        hosts = {node["NodeManagerAddress"] for node in self._ray.nodes() if node["Alive"]}
        own = str(self._ray.util.get_node_ip_address())
        security = Security.from_environment()
        bound, _, port = self._bind.rpartition(":")
        if hosts <= {own, "127.0.0.1"} and security.certificate is None:
            self._host = "127.0.0.1"
        elif security.certificate is None or security.token is None:
            raise ClusterError(
                f"Ray has other machines ({', '.join(sorted(hosts - {own}))}): expected TLS and a "
                "token. Make them with\n"
                f"  heterps certs DIR {' '.join(f'--host {host}' for host in sorted(hosts))}\n"
                "and set the variables that it prints"
            )
        else:
            from heterps.home.certs import names

            if unnamed := sorted(hosts - names(security.certificate)):
                raise ClusterError(
                    f"the certificate does not name {', '.join(unnamed)}; expected one made with\n"
                    f"  heterps certs DIR {' '.join(f'--host {host}' for host in sorted(hosts))}"
                )
            if is_loopback(bound):
                self._bind = f"{own}:{port}"

    def _begin_nodes(self) -> None:
        """None can start yet: they are told where the scheduler is."""

    def _start_nodes(self) -> None:
        """Place the daemons and wait until the scheduler knows them all."""
        ray = self._ray
        wanted = daemons(ray.nodes(), self.types, self.emulated)
        bundles = [daemon.takes for daemon in wanted]
        self._group = ray.util.placement_group(bundles, strategy="SPREAD")
        if not self._group.wait(_PLACED_S):
            needs = ", ".join(f"{daemon.units} {daemon.type}" for daemon in wanted)
            raise ClusterError(
                f"Ray placed no bundles of {needs} within {_PLACED_S:.0f} s: others may use its "
                "resources (`ray status` shows them)"
            )
        actor = ray.remote(NodeActor)
        strategy = import_module("ray.util.scheduling_strategies").PlacementGroupSchedulingStrategy
        files = _files()
        for index, daemon in enumerate(wanted):
            takes = dict(daemon.takes)
            options = {
                "num_cpus": takes.pop("CPU", 0),
                "num_gpus": takes.pop("GPU", 0),
                "resources": takes,
                "max_restarts": -1,
                "scheduling_strategy": strategy(self._group, placement_group_bundle_index=index),
            }
            self._actors.append(
                actor.options(**options).remote(daemon, self.address, self._host, files)
            )
        try:
            facts = ray.get([held.ready.remote() for held in self._actors], timeout=_READY_S)
        except ray.exceptions.GetTimeoutError:
            raise ClusterError(f"the nodes on Ray were not ready within {_READY_S:.0f} s") from None
        except ray.exceptions.RayError as error:
            raise ClusterError(f"a node on Ray did not start: {_cause(error)}") from None
        self._await_nodes({one["address"]: f"node {one['node_id']}" for one in facts})


class NodeActor:
    """Holds one node daemon. It ends when the daemon does, and Ray starts both again.

    Args:
        daemon: what to start.
        scheduler: address of the scheduler.
        host: where to listen; empty for this Ray node's address.
        files: contents of the TLS and token files, by variable.
    """

    def __init__(
        self, daemon: Daemon, scheduler: str, host: str, files: Mapping[str, bytes]
    ) -> None:
        ray = installed()
        setup_logging(f"ray {daemon.type}")
        host = host or str(ray.util.get_node_ip_address())
        place = str(ray.get_runtime_context().get_node_id())[:8]
        self._directory = Path(tempfile.mkdtemp(prefix="heterps-ray-"))  # readable by us alone
        self._stopping = threading.Event()
        environment = {}
        for variable, content in files.items():
            path = self._directory / variable.lower()
            path.write_bytes(content)
            path.chmod(0o600)
            environment[variable] = str(path)
        argv = module_argv("workers.node", "--type", daemon.type, "--units", str(daemon.units))
        argv += ["--scheduler", scheduler, "--bind", f"{host}:0", "--notice", "0"]
        argv += ["--node-id", f"{daemon.type}-ray-{place}-{uuid.uuid4().hex[:4]}"]
        argv += ["--emulate"] if daemon.emulated else []
        self._child = spawn("node", argv, directory=self._directory, environment=environment)
        threading.Thread(target=self._watch, name="watch", daemon=True).start()

    def ready(self) -> dict[str, Any]:
        """Wait until the daemon holds its lease: its address and id.

        Raises:
            ChildError: it did not start; quotes its log.
        """
        return self._child.wait_ready(_READY_S).facts

    def stop(self) -> None:
        """End the daemon and the processes of its jobs."""
        self._stopping.set()
        self._child.stop(_GRACE_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _watch(self) -> None:
        while (code := self._child.poll()) is None:
            time.sleep(0.2)
        if self._stopping.is_set():
            return
        lines = last_lines(self._child.log)
        _log.error("the daemon ended %s; its last lines:\n%s", describe_exit(code), lines)
        time.sleep(_PAUSE_S)
        shutil.rmtree(self._directory, ignore_errors=True)
        os._exit(1)


def installed() -> Any:
    """The package ray.

    Raises:
        ClusterError: it is not installed.
    """
    try:
        return import_module("ray")
    except ImportError:
        raise ClusterError(
            "--on ray: Ray is not installed; type `pip install 'heterps[ray]'`"
        ) from None


def _files() -> dict[str, bytes]:
    """What the environment names, read."""
    named = ((variable, os.environ.get(variable)) for variable in VARIABLES)
    return {variable: Path(path).read_bytes() for variable, path in named if path}


def _cause(error: BaseException) -> str:
    """The error of the actor's own code, without Ray's frames."""
    text = str(getattr(error, "cause", None) or error)
    lines: Sequence[str] = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-20:])
