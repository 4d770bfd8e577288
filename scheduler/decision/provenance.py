"""What a decision was made from: a hash of its inputs, and the versions that made it."""

import hashlib
import json
import platform
from functools import cache

import numpy as np

from scheduler.problem.demands import Demands
from scheduler.problem.workload import Resources, Workload


def input_hash(workload: Workload, resources: Resources, demands: Demands) -> str:
    """Return the SHA-256, in hexadecimal, of workload, resources and demands as canonical JSON.

    Two decisions with the same hash answered the same question: keys are sorted, numbers are
    written to full precision, files and comments play no part.
    """
    content = {
        "workload": workload.to_json(),
        "resources": resources.to_json(),
        "demands": demands.to_json(),
    }
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def versions(policy: str = "") -> dict[str, str]:
    """Return the versions that a plan depends on, by name.

    Args:
        policy: identity of the agent's policy, where one took part.
    """
    found = {
        "heterps": _installed(),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }
    return {**found, "policy": policy} if policy else found


@cache
def _installed() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("heterps")
    except PackageNotFoundError:
        return "source"
