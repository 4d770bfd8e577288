"""The peers of the parameter-server benchmark, and where those of other systems are installed."""

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path

OURS = "heterps"
GRPC = "heterps-grpc"  # where streams cannot be had
LOCAL = "heterps-shm"  # as it is by default where client and shards share a host
TLS = "heterps-tls"
CEILING = "echo"
TLS_CEILING = "echo-tls"
DEFAULT_DIR = Path.home() / ".cache" / "heterps-bench"
_FBGEMM = "fbgemm-gpu-cpu==1.8.0"  # loads with torch 2.13; its other versions do not
# What it imports here of what it asks for: FBGEMM's build for GPUs is among that, too.
_TORCHREC = (
    "torchrec==1.9.2",
    "tensordict==0.15.3",
    "pyvers==0.2.3",
    "cloudpickle>=3.1",
    "pyre-extensions==0.0.32",
    "typing-inspect==0.9.0",
    "mypy-extensions>=1.0",
)
# The newest TFRA wheel is for this TensorFlow and at most Python 3.11, and needs symbols that
# `tensorflow-cpu` lacks. The last two it imports without asking for them.
_TENSORFLOW = (
    "tensorflow==2.16.2",
    "tf-keras==2.16.0",
    "tensorflow-recommenders-addons==0.8.1",
    "typeguard>=2.7",
    "packaging",
)


@dataclass(frozen=True, slots=True)
class Entry:
    """A peer.

    Attributes:
        name: in tables and options.
        module: under `bench.ps.peers`.
        title: what it is, in a few words.
        networked: whether rows are in other processes.
        dynamic: whether any 64-bit key may come.
        needs: folder of the peers' directory that it runs from; empty for none.
        tls: whether all that it sends is encrypted, and its client checks who is there.
    """

    name: str
    module: str
    title: str
    networked: bool = True
    dynamic: bool = True
    needs: str = ""
    tls: bool = False


ENTRIES = (
    Entry(OURS, "heterps", "HeterPS, exact Adagrad"),
    Entry(GRPC, "heterps_grpc", "HeterPS by gRPC alone"),
    Entry(LOCAL, "heterps_shm", "HeterPS through shared memory"),
    Entry(TLS, "heterps_tls", "HeterPS, exact Adagrad, TLS 1.3", tls=True),
    Entry(CEILING, "echo", "raw gRPC echo of the same bytes", dynamic=False),
    Entry(TLS_CEILING, "echo_tls", "raw gRPC echo of the same bytes, TLS", dynamic=False, tls=True),
    Entry("tfra", "tfra", "TFRA on TensorFlow servers", needs="tensorflow"),
    Entry(
        "tensorflow",
        "tensorflow_ps",
        "TensorFlow ParameterServerStrategy",
        dynamic=False,
        needs="tensorflow",
    ),
    Entry("torch-rpc", "torch_rpc", "PyTorch RPC, static array", dynamic=False),
    Entry("redis", "redis_rows", "Valkey, Adagrad in the client"),
    Entry("grpc-dict", "grpc_dict", "Python dictionary behind gRPC"),
    Entry(
        "fbgemm", "fbgemm", "FBGEMM TBE in process", networked=False, dynamic=False, needs="fbgemm"
    ),
    Entry(
        "fbgemm-rowwise",
        "fbgemm_rowwise",
        "FBGEMM TBE in process, row-wise Adagrad",
        networked=False,
        dynamic=False,
        needs="fbgemm",
    ),
)


def chosen(names: str) -> list[Entry]:
    """Entries of a comma-separated list, all of an empty one; ours is always the first.

    Raises:
        SystemExit: a name is not known.
    """
    wanted = [name for name in names.split(",") if name] or [entry.name for entry in ENTRIES]
    known = {entry.name: entry for entry in ENTRIES}
    for name in wanted:
        if name not in known:
            raise SystemExit(f"--peers: unknown peer {name!r}; expected {', '.join(known)}")
    return [entry for entry in ENTRIES if entry.name in {OURS, *wanted}]


def launch(
    entry: Entry, peers_dir: Path, certificates: Mapping[str, str]
) -> tuple[list[str], dict[str, str]] | str:
    """Command and environment of a client process, or why it cannot be started.

    Args:
        certificates: variables of the environment of those that speak TLS.
    """
    # Client and shards share the cores: threads that wait for work must not spin on them.
    python, environment = sys.executable, {"GOMP_SPINCOUNT": "0", **os.environ}
    if entry.tls:
        environment |= certificates
    home = peers_dir / entry.needs
    if entry.needs == "tensorflow":
        python = str(home / "bin" / "python")
        environment.pop("PYTHONPATH", None)
        present = Path(python).exists()
    elif entry.needs:
        environment["PYTHONPATH"] = os.pathsep.join([str(home), environment.get("PYTHONPATH", "")])
        present = home.is_dir()
    else:
        present = True
    if not present:
        return f"{home} is not there: python -m bench.ps --install-peers makes it"
    return [python, "-m", f"bench.ps.peers.{entry.module}"], environment


def install(peers_dir: Path, say: Callable[[str], None]) -> bool:
    """Install the systems that need a place of their own; whether all of them were."""
    peers_dir.mkdir(parents=True, exist_ok=True)
    done = [_install(peers_dir / "fbgemm", (_FBGEMM,), say)]
    done.append(_install(peers_dir / "torchrec", _TORCHREC, say))
    done.append(_install_tensorflow(peers_dir / "tensorflow", say))
    return all(done)


def installed(peers_dir: Path) -> dict[str, str]:
    """Versions of what was installed there, by the names that it was asked for by."""
    asked = (_FBGEMM, _TORCHREC[0], *_TENSORFLOW[:3])
    names = {one.partition("==")[0] for one in asked}
    found = {}
    for folder in sorted(peers_dir.glob("*")):
        homes = [folder, *folder.glob("lib/python*/site-packages")]
        for one in distributions(path=[str(home) for home in homes]):
            name = one.name.replace("_", "-")
            if name in names:
                found[name] = one.version
    return found


def _install(home: Path, packages: Sequence[str], say: Callable[[str], None]) -> bool:
    """Install packages, and nothing that they ask for, beside this interpreter's own."""
    say(f"installing {packages[0]} into {home}")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--upgrade", "--no-deps"]
    return _ran([*pip, "--target", str(home), *packages], say)


def _install_tensorflow(home: Path, say: Callable[[str], None]) -> bool:
    here = sys.version_info[:2] == (3, 11)
    python = sys.executable if here else shutil.which("python3.11")
    if python is None:
        say("TensorFlow and TFRA: not installed: there is no python3.11, which TFRA's wheel needs")
        return False
    say(f"installing TensorFlow and TFRA into {home} (2.5 GB)")
    pip = [str(home / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    return _ran([python, "-m", "venv", str(home)], say) and _ran([*pip, *_TENSORFLOW], say)


def _ran(argv: list[str], say: Callable[[str], None]) -> bool:
    result = subprocess.run(argv, text=True, capture_output=True, check=False)
    if result.returncode:
        last = (result.stderr.strip() or result.stdout.strip()).splitlines()[-1:]
        say(f"not installed: {' '.join(argv[:4])} ...: {' '.join(last)}")
    return result.returncode == 0
