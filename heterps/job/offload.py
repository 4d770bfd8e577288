"""What a job file says of experts out of memory; checked before all else."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Final

from heterps.job.checkpoints import Wrong
from protos.job_pb2 import JobSpec
from workers.offload.running.size import bytes_of

# As `workers.offload.slots.policy.POLICIES`, which torch comes with.
POLICIES: Final = ("clock", "lfu", "lfu-decay", "lru")
_KEY: Final = "train.offload"
_MOST_READERS: Final = 64


def complete_offload(job: JobSpec, given: Collection[str]) -> None:
    """A step of such a job lacks no update, unless the file asks for that, which is refused."""
    if _KEY in given and "train.staleness" not in given:
        job.train.staleness = 0


def wrong_offload(job: JobSpec, given: Collection[str]) -> Iterator[Wrong]:
    """What is wrong with `train.offload`.

    Args:
        given: the dotted keys that the file has.
    """
    train = job.train
    spec = train.offload
    if _KEY not in given:
        return
    if not spec.memory:
        yield Wrong(f"{_KEY}.memory", "nothing", "bytes for experts in memory, such as 2GB")
    try:
        if spec.memory and bytes_of(spec.memory, "") <= 0:
            yield Wrong(f"{_KEY}.memory", repr(spec.memory), "more than no bytes, such as 2GB")
    except ValueError:
        yield Wrong(f"{_KEY}.memory", repr(spec.memory), "bytes, or such as 2GB or 512MiB")
    if spec.path and not Path(spec.path).is_absolute():
        text = "an absolute path of a folder that each host has on a disk, or none"
        yield Wrong(f"{_KEY}.path", repr(spec.path), text)
    if spec.policy and spec.policy not in POLICIES:
        yield Wrong(f"{_KEY}.policy", repr(spec.policy), f"one of {', '.join(POLICIES)}")
    if spec.readers > _MOST_READERS:
        yield Wrong(f"{_KEY}.readers", str(spec.readers), f"1 to {_MOST_READERS} threads, or none")
    if train.staleness:
        text = f"0: with {_KEY} a step begins when the one before it is over"
        yield Wrong("train.staleness", str(train.staleness), text)
    if train.split_experts:
        text = f"false: with {_KEY} each worker of a stage has all of its experts on its disk"
        yield Wrong("train.split_experts", "true", text)
    if train.ema:
        text = f"0: averages of experts out of memory are not kept; or no {_KEY}"
        yield Wrong("train.ema", f"{train.ema:g}", text)
    if train.compile:
        text = f"none: layers that torch compiles have their experts in memory; or no {_KEY}"
        yield Wrong("train.compile", str(list(train.compile)), text)
