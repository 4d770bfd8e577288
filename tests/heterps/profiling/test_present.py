"""Which types are on a machine of so many cores."""

from heterps.profiling import present
from protos.decision_pb2 import ResourceType


def _found(units: int | None = None, **threads: int) -> dict[str, int]:
    kinds = [ResourceType(name=name, device="cpu", threads=n) for name, n in threads.items()]
    return present.present_types(kinds, units=units)


def test_units_of_several_cores_are_as_many_as_fit() -> None:
    assert _found(units=7, cpu=0) == {"cpu": 7}
    assert _found(units=7, cpu=1) == {"cpu": 7}
    assert _found(units=7, cpu=2) == {"cpu": 3}
    assert _found(cpu=1) == {"cpu": present.cores()}


def test_one_that_has_more_threads_than_there_are_cores_is_not_here() -> None:
    assert _found(units=3, cpu4=4) == {}
    assert _found(units=3, cpu4=4, cpu2=2, cpu=0) == {"cpu2": 1}  # one pool: the first that fits
