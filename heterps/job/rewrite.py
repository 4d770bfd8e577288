"""A job anew, with the profile and the plan that a proposal came to."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import yaml
from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct

from chassis.files import replace_file
from heterps.errors import HeterpsError
from protos.job_pb2 import JobSpec
from protos.naming import field_name

if TYPE_CHECKING:
    from scheduler.decision.record import Decision
    from scheduler.replanning.proposal import Proposal

# Where a job file has paths relative to its own folder, in the form PATH or PATH:NAME.
_PATHS: Final = ("data.path", "schedule.resources", "output")
_CALLABLES: Final = (
    "model.entry",
    "model.loss",
    "model.metrics",
    "model.callbacks",
    "data.prepare",
)
# Read by the client, or replaced by the proposal.
_LEFT_OUT: Final = (
    *("directory", "code", "code_digest", "entry_digest"),
    *("train.resume", "train.routes", "schedule.offered", "schedule.given"),
)


def write_job(
    path: Path, spec: JobSpec | None, decision: "Decision", proposal: "Proposal"
) -> tuple[Path, Path]:
    """Write a job file whose plan is the proposed one, and its profile beside it.

    Args:
        path: of the job file; it must not exist.
        spec: the job that ran; without it the file has the `schedule:` section alone, to be put
            into a job file.
        decision: what the job ran by.

    Returns:
        The job file and the workload file.

    Raises:
        HeterpsError: a file exists already or cannot be written.
    """
    profile = path.with_name(f"{path.stem}.workload.json")
    proposed = proposal.proposed
    assert proposed.workload is not None
    assert decision.workload is not None
    workload = replace(proposed.workload, samples=decision.workload.samples)
    job = job_content(spec) if spec is not None else {}
    layers = [layer.name for layer in workload.layers]
    job["schedule"] = {
        **job.get("schedule", {}),
        "method": "exact",
        "workload": profile.name,
        "pin": dict(zip(layers, proposed.assignment, strict=True)),
    }
    if proposed.min_throughput:
        # The model's floor: what the run is expected to fall behind it is in this figure.
        job["schedule"]["min_throughput"] = proposed.min_throughput
    for file in (path, profile):
        if file.exists():
            raise HeterpsError(f"{file}: is there already; expected the name of a new file")
    _write(profile, json.dumps(workload.to_json(), indent=2, allow_nan=False) + "\n")
    _write(path, yaml.safe_dump(job, sort_keys=False, allow_unicode=True))
    return path, profile


def job_content(spec: JobSpec) -> dict[str, Any]:
    """A job as a job file has it, in the order of the schema, with absolute paths."""
    content = _plain(spec, "")
    folder = Path(spec.directory)
    for key in (*_PATHS, *_CALLABLES):
        part, _, name = key.rpartition(".")
        holder = content.get(part, {}) if part else content
        value = holder.get(name)
        if isinstance(value, list):
            holder[name] = [str(folder / one) for one in value]
        elif value and "://" not in value:
            holder[name] = str(folder / value)
    return content


def _plain(message: Message, path: str) -> dict[str, Any]:
    """The fields that are set; the zeros of `train` too, because not every default is 0 there.

    Of fields that may be 0 or not be given, what was given.
    """
    content: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        key = f"{path}.{field.name}" if path else field.name
        value = getattr(message, field.name)
        if key in _LEFT_OUT:
            continue
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            value = {name: _entry(one, key) for name, one in sorted(value.items())}
        elif field.is_repeated:
            value = list(value)
        elif isinstance(value, Struct):
            value = _whole(MessageToDict(value))
        elif field.message_type is not None:
            value = _plain(value, key)
        given = field.has_presence and field.message_type is None and message.HasField(field.name)
        if given or value or (path == "train" and not field.message_type and value == 0):
            content[field_name(field)] = value
    return content


def _entry(value: Any, path: str) -> Any:
    """What a map has under a name."""
    if isinstance(value, Struct):
        return _whole(MessageToDict(value))
    return _plain(value, path) if isinstance(value, Message) else value


def _whole(value: Any) -> Any:
    """The same with numbers that are whole written so: a message holds all as floats."""
    if isinstance(value, Mapping):
        return {key: _whole(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_whole(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _write(path: Path, text: str) -> None:
    try:
        replace_file(path, text)
    except OSError as error:
        raise HeterpsError(f"{path}: cannot be written ({error.strerror})") from None
