"""What of a node each of its workers gets: a GPU, as long as there are as many, and a core."""

import os
from collections.abc import Iterable, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"
_HUGE_PAGES = "glibc.malloc.hugetlb=1"


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


def compute_environment(threads: int = 1) -> dict[str, str]:
    """The environment of processes that compute.

    A unit is so many cores: libraries must not take more. Large blocks of memory come in huge
    pages: where a page costs much, as in virtual machines, a tensor of 48 MB otherwise takes
    longer to get than to fill. Hashes of text are alike on all nodes, since a model may be made in
    the order of a set.
    """
    libraries = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    cores = dict.fromkeys(libraries, str(threads))
    huge = os.environ.get("GLIBC_TUNABLES", _HUGE_PAGES)
    return cores | {"GLIBC_TUNABLES": huge, "PYTHONHASHSEED": "0"}
