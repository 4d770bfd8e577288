"""The forms in which a workload and resources may be given."""

from collections.abc import Mapping
from typing import Any

from protos import decision_pb2 as pb
from scheduler.problem.workload import Resources, Workload

WorkloadLike = Workload | pb.Workload | Mapping[str, Any]
ResourcesLike = Resources | pb.Resources | Mapping[str, Any]


def as_workload(value: WorkloadLike) -> Workload:
    """Return a workload from its parsed file, message or dataclass.

    Raises:
        InputError: naming key path, value and what was expected.
    """
    if isinstance(value, Workload):
        return value
    if isinstance(value, pb.Workload):
        return Workload.from_message(value, "workload")
    return Workload.parse(value, "workload")


def as_resources(value: ResourcesLike) -> Resources:
    """Return resources from their parsed file, message or dataclass.

    Raises:
        InputError: naming key path, value and what was expected.
    """
    if isinstance(value, Resources):
        return value
    if isinstance(value, pb.Resources):
        return Resources.from_message(value, "resources")
    return Resources.parse(value, "resources")
