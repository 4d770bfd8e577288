"""What a job file says of inputs by name; checked before all else."""

import keyword
from collections.abc import Iterator
from math import prod
from typing import Final

from chassis.near import nearest
from heterps.job.checkpoints import Wrong
from protos.job_pb2 import JobSpec

_LISTS: Final = ("keys", "floats", "ints", "mask")
_KEYS: Final = ("key", "keys")
_TYPES: Final = ("key", "keys", "float", "floats", "int", "ints", "mask", "image")
_SHAPED: Final = ("floats", "ints", "image")
_FITS: Final = ("resize", "crop")
_CHANNELS: Final = (1, 3, 4)
MOST_VALUES: Final = 1 << 24
ENDS: Final = ("first", "last")
_TAKEN: Final = ("sparse", "dense", "tokens", "batch")
LONGEST: Final = 1 << 16


def wrong_inputs(job: JobSpec) -> Iterator[Wrong]:
    """What is wrong with `data.columns` and `data.join`."""
    for name, join in sorted(job.data.join.items()):
        key = f"data.join.{name}"
        if not name.isidentifier():
            yield Wrong(key, repr(name), "a name of letters, digits and _")
        if not join.file:
            yield Wrong(f"{key}.file", "''", "a file name or glob under data.path")
        if not (join.by or join.time):
            yield Wrong(f"{key}.by", "[]", "columns that both have, such as [user], or a time")
        for field, written in (*(("by", one) for one in join.by), ("time", join.time or "x")):
            parts = [part.strip() for part in written.split("=")]
            if len(parts) > 2 or not all(parts):
                text = "a column, or one of each file, such as viewer=user"
                yield Wrong(f"{key}.{field}", repr(written), text)
    labels = {job.data.label, *job.data.labels} - {""}
    if job.train.loss == "next_token":  # what follows is of the same lists
        labels.discard(job.data.label)
    for name, one in sorted(job.data.columns.items()):
        key = f"data.columns.{name}"
        sound = name.isidentifier() and name.isascii()  # torch.fx knows no other names
        if not sound or keyword.iskeyword(name) or name in _TAKEN:
            text = f"an argument's name in ASCII letters, digits and _, but for {', '.join(_TAKEN)}"
            yield Wrong(key, repr(name), text)
        if one.type not in _TYPES:
            near = nearest(one.type, _TYPES)
            hint = f"; did you mean {near}?" if near else ""
            yield Wrong(f"{key}.type", repr(one.type), f"one of {', '.join(_TYPES)}{hint}")
        elif one.type not in _SHAPED and one.shape:
            yield Wrong(f"{key}.shape", str(list(one.shape)), f"none of a {one.type}")
        elif one.type != "image" and one.fit:
            yield Wrong(f"{key}.fit", repr(one.fit), f"none of a {one.type}")
        elif one.type == "image" and (len(one.shape) != 3 or one.shape[0] not in _CHANNELS):
            text = "channels (1, 3 or 4), height and width, such as [3, 224, 224]"
            yield Wrong(f"{key}.shape", str(list(one.shape)), text)
        elif one.fit and one.fit not in _FITS:
            yield Wrong(f"{key}.fit", repr(one.fit), f"one of {', '.join(_FITS)}")
        elif one.shape and not 1 <= prod(one.shape) <= MOST_VALUES:
            yield Wrong(f"{key}.shape", str(list(one.shape)), f"1 to {MOST_VALUES} values")
        elif one.shape and (one.length or one.keep or one.padding):
            yield Wrong(
                f"{key}.shape", str(list(one.shape)), "no length, keep or padding beside it"
            )
        elif one.type in _LISTS and not one.shape and not 1 <= one.length <= LONGEST:
            yield Wrong(f"{key}.length", str(one.length), f"1 to {LONGEST} values of a list")
        elif one.type not in _LISTS and one.length:
            yield Wrong(f"{key}.length", str(one.length), f"none of a {one.type}")
        elif one.type not in _KEYS and one.slot:
            yield Wrong(f"{key}.slot", repr(one.slot), f"none of a {one.type}")
        elif one.padding and one.type != "ints":
            yield Wrong(f"{key}.padding", str(one.padding), f"none of a {one.type}")
        elif one.keep and one.type not in _LISTS:
            yield Wrong(f"{key}.keep", repr(one.keep), f"none of a {one.type}")
        elif one.keep and one.keep not in ENDS:
            yield Wrong(f"{key}.keep", repr(one.keep), f"one of {', '.join(ENDS)}")
        if labels & {part.strip() for part in (one.of or name).split("*")}:
            yield Wrong(f"{key}.of", repr(one.of or name), "columns known before the outcome")
