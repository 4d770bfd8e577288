"""Whether two jobs are one training, of which one may go on from the other's state."""

import json
import os
from collections.abc import Iterator

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

from protos.job_pb2 import JobSpec, TableOptions
from protos.naming import field_name

# What another plan, other machines or another folder may change without changing the training.
_FREE = frozenset(
    (
        *("data.path", "data.prepare"),
        *("train.checkpoint", "train.loggers", "train.from", "train.resume", "train.routes"),
        "train.offload",
    )
)
_TRAINING = ("model", "data", "train")


def differences(job: JobSpec, before: JobSpec) -> Iterator[tuple[str, str, str]]:
    """What makes two jobs different trainings: keys, with the values of `job` and of `before`."""
    for key in _TRAINING:
        yield from _compared(getattr(job, key), getattr(before, key), key)
    for name in sorted({*job.tables, *before.tables}):
        mine, theirs = TableOptions(), TableOptions()
        for options, one in ((mine, job), (theirs, before)):
            if name in one.tables:
                options.CopyFrom(one.tables[name])
            options.ClearField("memory_bytes")  # how rows lie and travel may change
            options.ClearField("wire")
        if mine != theirs:
            yield f"tables.{name}", _shown(mine), _shown(theirs)


def _compared(new: Message, old: Message, path: str) -> Iterator[tuple[str, str, str]]:
    for spec in new.DESCRIPTOR.fields:
        key = f"{path}.{field_name(spec)}"
        mine, theirs = getattr(new, spec.name), getattr(old, spec.name)
        if key in _FREE or mine == theirs:
            continue
        if key == "model.entry" and os.path.normpath(mine) == os.path.normpath(theirs):
            continue
        if key != "model.args" and isinstance(mine, Message):
            yield from _compared(mine, theirs, key)
        else:
            yield key, _shown(mine), _shown(theirs)


def _shown(value: object) -> str:
    if isinstance(value, Message):
        return json.dumps(MessageToDict(value, preserving_proto_field_name=True))[:200]
    return repr(value) if isinstance(value, str | bool | int | float) else str(list(value))  # type: ignore[call-overload]
