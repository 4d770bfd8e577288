"""Types that leave open on how many of their cores a worker computes.

Their units are single cores. A plan is made for one number of threads: a unit is then so many
cores, and costs and holds so many times as much. The number is one for all workers of a plan on the
type, and for the parameter server's units there.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from protos.decision_pb2 import ResourceType as Message
from scheduler.problem.fields import InputError
from scheduler.problem.workload import Resources, ResourceType, Workload

_MULTIPLIED: Final = ("price_per_hour", "memory_bytes", "flops_per_s", "memory_bandwidth")
_DIVIDED: Final = ("limit", "units_per_host")


def cut(resources: Resources, workload: Workload) -> Resources:
    """The types that costs are of; those that leave nothing open as they are.

    Raises:
        InputError: costs are of a number of threads that a type does not have.
    """
    return replace(resources, types=tuple(_cut(kind, workload) for kind in resources.types))


def _cut(kind: ResourceType, workload: Workload) -> ResourceType:
    if not kind.threads_any:
        return kind
    threads = workload.threads.get(kind.name, 1)
    if threads not in kind.threads_any:
        numbers = " or ".join(map(str, kind.threads_any))
        where = f"threads.{kind.name}"
        problem = f"the costs are of a worker with {threads}: expected {numbers}"
        raise InputError(workload.source, where, problem)
    for most, of in ((kind.limit, "the limit"), (kind.units_per_host or threads, "a host's")):
        if threads > most:
            where = f"threads.{kind.name}"
            problem = f"{threads}: expected at most {of}, {most} cores"
            raise InputError(workload.source, where, problem)
    found = {name: getattr(kind, name) * threads for name in _MULTIPLIED}
    found |= {name: getattr(kind, name) // threads for name in _DIVIDED}
    more = threads if threads > 1 else 0
    return replace(kind, **found, threads=more, threads_any=(), node_units=more)


def cut_message(kind: Message, threads: int) -> None:
    """As `cut`, of a message, in place."""
    for name in _MULTIPLIED:
        setattr(kind, name, getattr(kind, name) * threads)
    for name in _DIVIDED:
        setattr(kind, name, getattr(kind, name) // threads)
    kind.threads = kind.node_units = threads if threads > 1 else 0
    kind.ClearField("threads_any")


def node_units(types: Sequence[Message]) -> dict[str, int]:
    """How many of the units that nodes declare are in one of a plan's, of types with several."""
    return {kind.name: kind.node_units for kind in types if kind.node_units > 1}


def choices(types: Sequence[Message]) -> list[dict[str, int]]:
    """The numbers of threads that plans may be made for, by type; one way where none is open."""
    for kind in types:
        if kind.threads_any:
            return [{kind.name: number} for number in dict.fromkeys(kind.threads_any)]
    return [{}]
