"""Names and numbers that several rooms must agree on."""

from typing import Any

KEPT = "heterps://"  # HOST:PORT/JOB_ID[/FOLDER]: a job's files that the scheduler keeps
TAKEN_OVER = "from"  # the folder among these of what a job has from an earlier one
MOST_SHARDS = 1024  # of a job: each has one at least of the buckets that keys fall into


def table_prefix(job_id: str) -> str:
    """What the names of a job's tables begin with on the parameter servers.

    The length in front keeps job `a` from claiming the tables of job `a.b`.
    """
    return f"{len(job_id)}.{job_id}."


def without_prefix(table: str) -> str:
    """The name of a table within its job; of one that is no job's, its name."""
    length, dot, rest = table.partition(".")
    if not (dot and length.isdecimal() and rest[int(length) : int(length) + 1] == "."):
        return table
    return rest[int(length) + 1 :]


def kept_place(url: str) -> tuple[str, str, str]:
    """The scheduler's address, the job and the folder within its files that a URL names.

    Raises:
        ValueError: it is no such URL.
    """
    address, _, rest = url.removeprefix(KEPT).partition("/")
    job_id, _, folder = rest.strip("/").partition("/")
    if not url.startswith(KEPT) or not address or not job_id:
        raise ValueError(f"{url!r}: expected {KEPT}HOST:PORT/JOB_ID")
    return address, job_id, folder


def cuts_of(output: str) -> str:
    """Where the cuts of a job lie whose model is saved at `output`."""
    return f"{output}/cuts" if output.startswith(KEPT) else f"{output}.cuts"


def kept_with(output: str, address: str) -> str:
    """The same place with the scheduler that leads now; a folder as it is."""
    if not output.startswith(KEPT):
        return output
    _, job_id, folder = kept_place(output)
    return f"{KEPT}{address}/{job_id}" + (f"/{folder}" if folder else "")


def field_name(spec: Any) -> str:
    """What the field of a descriptor is called in a file: its name, or that which it is given.

    The stubs of protobuf give a descriptor two types, that of its C core included.
    """
    first, *others = spec.name.split("_")
    usual = first + "".join(word.capitalize() for word in others)
    return str(spec.name if spec.json_name == usual else spec.json_name)
