"""The methods of all services, and which role may call which: written down apart from the table."""

from functools import cache
from importlib import import_module
from pathlib import Path

import protos


@cache
def _declared():
    """Of each method that the proto files declare, whether it takes and gives streams."""
    found = {}
    for path in sorted(Path(protos.__file__).parent.glob("*_pb2.py")):
        file = import_module(f"protos.{path.stem}").DESCRIPTOR
        for service in file.services_by_name.values():
            for method in service.methods:
                streams = method.client_streaming, method.server_streaming
                found[f"/{service.full_name}/{method.name}"] = streams
    return found


def every_method():
    return set(_declared())


STREAMS = _declared()


def _of(service, names):
    return {f"/heterps.v1.{service}/{name}" for name in names.split()}


_LOOKS = (
    _of("Scheduler", "GetJob ListJobs WatchJob Logs GetDecision ListDecisions GetReplan ListNodes")
    | _of("History", "GetHistory")
    | _of("Access", "WhoAmI")
)
_JOBS_OWN = (
    _of("Scheduler", "Report")
    | _of("Artifacts", "Has Put Get List Remove")
    | _of("Stage", "Start Regroup Pause ReadState Connect Join")
    | _of("ParameterServer", "Pull Push Attach Advance Stage Tally Commit Stats Keys Route")
    | _of("ParameterServer", "CreateTable DropTables Shrink Cut Keep Save Load")
)
_SUBMITS = _LOOKS | _JOBS_OWN | _of("Scheduler", "Submit CancelJob MoveJob Plan")
MAY = {
    "read": _LOOKS,
    "job": _JOBS_OWN,
    "submit": _SUBMITS,
    "operate": _SUBMITS | _of("Access", "ListTokens") | _of("Scheduler", "DrainNode"),
    "cluster": every_method(),
}
