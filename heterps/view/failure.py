"""Why a job failed, as its owner needs it: what it means, their own code's frames, not ours."""

import re

# What each reason of the closed list means, for whom the name alone says too little.
MEANINGS = {
    "succeeded": "it trained to the end",
    "cancelled": "someone cancelled it",
    "user_error": "the job's own code raised an error",
    "invalid_job": "what was submitted cannot be planned or run",
    "infeasible_plan": "no plan meets the job's demands",
    "out_of_memory": "memory ran out",
    "deadline": "it ran for longer than its deadline_hours",
    "no_capacity": "the units that it needs are not there any more",
    "lost_node": "a node was silent, stopped or gone",
    "lost_shard": "a parameter-server shard died, with its rows",
    "worker_crashed": "a worker ended by a signal, or without a word",
    "connection_lost": "its processes could not reach each other",
    "scheduler_lost": "the scheduler went away and could not take the job up again",
    "internal": "a fault of HeterPS",
    "disk_full": "there was no room on a disk",
    "cut_unreadable": "the cut that it was to go on from is gone or damaged",
    "diverged": "a loss or gradient was not finite",
}
# Another attempt may do better: the job's own code and file are not the cause.
NOT_THE_JOB = frozenset(
    (
        "no_capacity",
        "lost_node",
        "lost_shard",
        "worker_crashed",
        "connection_lost",
        "cut_unreadable",
        "scheduler_lost",
        "internal",
    )
)

DIVERGED = "diverged"


def kept_model(succeeded: bool, end_reason: str) -> str:
    """What to call the model that a job leaves; nothing where it leaves none."""
    if end_reason == DIVERGED:
        return "model of before the step that diverged"
    return "model" if succeeded else ""


_TRACE = "Traceback (most recent call last):"
_FRAME = re.compile(r'\s+File "(?P<path>[^"]+)", line \d+')
_MODULE = re.compile(r"^[\w.]+\.(?=\w+: )")  # an error's name, the last line of a traceback
_OURS = re.compile(
    r"(/site-packages/|/dist-packages/|/lib/python3[^/]*/|^<frozen )"
    r"|/(heterps|scheduler|workers|ps|protos)/([\w/]+/)?\w+\.py$"
)


def shortened(reason: str) -> str:
    """The reason without frames of HeterPS, of libraries and of Python.

    A traceback that has no other frames goes altogether; its last line, the error, stays. Lines
    that say again what a line before them said are left out.
    """
    kept: list[str] = []
    lines = reason.splitlines()
    position = 0
    while position < len(lines):
        if lines[position].strip() == _TRACE:
            position, frames = _frames(lines, position + 1)
            kept += [_TRACE, *frames] if frames else []
        else:
            kept.append(lines[position])
            position += 1
    said: list[str] = []
    for line in kept:
        text = _MODULE.sub("", line.strip())
        if not any(text and text in before for before in said):
            said.append(line)
    return "\n".join(said)


def _frames(lines: list[str], position: int) -> tuple[int, list[str]]:
    """The user's own frames of a traceback that begins at `position`, and where it ends."""
    frames: list[str] = []
    keep = False
    while position < len(lines) and lines[position].startswith((" ", "\t")):
        frame = _FRAME.match(lines[position])
        if frame is not None:
            keep = _OURS.search(frame["path"]) is None
        if keep:
            frames.append(lines[position])
        position += 1
    return position, frames
