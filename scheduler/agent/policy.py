"""The shipped policy: its file, and the network read from it. Planning needs no torch."""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from scheduler.engine import _planner

SHIPPED = Path(__file__).with_name("policy.safetensors")


@dataclass(frozen=True, slots=True)
class Policy:
    """A network, and what its file says about how it was trained."""

    network: _planner.Network
    note: dict[str, str]
    path: Path

    @property
    def version(self) -> str:
        """Short name of the training that made it."""
        return self.note.get("version", "unnamed")


def load(path: Path = SHIPPED) -> Policy:
    """Read a policy file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it holds no policy of this version.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "np") as file:
            note = dict(file.metadata() or {})
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        config = json.loads(note["config"])
        network = _planner.Network(weights, config["distances"], config["heads"], config["blocks"])
    except (SafetensorError, KeyError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{path}: expected a policy of this version: {error}") from error
    return Policy(network, note, path)


@cache
def shipped() -> Policy:
    """The policy of this installation, read once."""
    return load()
