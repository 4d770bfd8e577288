"""Which GPU of a node each of its workers sees: one each, as long as there are as many."""

from collections.abc import Iterable, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"


def gpus_of(count: int, environment: Mapping[str, str]) -> list[str]:
    """The names of a node's GPUs, as CUDA_VISIBLE_DEVICES takes them.

    Args:
        count: how many PyTorch finds.
        environment: of the node, which may itself see some of the host's alone.
    """
    named = [name.strip() for name in environment.get(VISIBLE, "").split(",") if name.strip()]
    return (named or [str(number) for number in range(count)])[:count]


def least_used(gpus: Sequence[str], used: Iterable[str]) -> str:
    """The first of those that the fewest workers have."""
    holders = list(used)
    return min(gpus, key=holders.count)


def one_thread() -> dict[str, str]:
    """A unit is one core: libraries must not take more."""
    return {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
