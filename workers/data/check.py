"""What can be known of a job's data without reading all of it, before anything is trained."""

from itertools import islice
from typing import Final

from chassis import scratch
from protos.job_pb2 import JobSpec
from workers.data.errors import DataError
from workers.data.reader import Dataset, Split

_SAMPLED: Final = 16  # files of a split


def check(job: JobSpec) -> None:
    """Look at files, columns and types of every split, what Parquet says of values, and first rows.

    Raises:
        DataError: something does not match the job, with file, column and row.
    """
    for split in splits(job):
        _look(Dataset.of(job, split), split)


def check_all(job: JobSpec) -> None:
    """The same, and every row of the held-out splits that this host will keep for evaluation.

    They are parsed once in any case; better before hours of training than after.
    """
    for split in splits(job):
        dataset = Dataset.of(job, split)
        _look(dataset, split)
        if split != "train" and dataset.is_kept and scratch.own() is not None:
            dataset.encoded()


def splits(job: JobSpec) -> list[Split]:
    """The splits that a job has."""
    given: dict[Split, str] = {"train": job.data.train, "valid": job.data.valid}
    given["test"] = job.data.test
    return [split for split, pattern in given.items() if pattern]


def _look(dataset: Dataset, split: Split) -> None:
    dataset.check_values()
    seen: dict[str, int] = {}
    for index, unit in enumerate(dataset.units):
        seen.setdefault(str(unit.path), index)
    first = list(seen.values())
    sampled = first[:: -(-len(first) // _SAMPLED) or 1]
    rows = sum(len(block) for index in sampled for block in islice(dataset.read(index), 1))
    if not rows and len(sampled) == len(dataset.units):
        raise DataError(dataset.where, f"data.{split}", "no rows", "a split with rows")
