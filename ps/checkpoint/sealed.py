"""JSON whose last field is the SHA-256 of all that stands before it.

So damage is found before anything in it is believed.
"""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from ps.errors import CheckpointError

_CHECKSUM = b',\n "sha256": "'  # the last field, as json.dumps would write it
_END = b"\n}"


def seal(tree: Mapping[str, Any]) -> bytes:
    """The text of an object."""
    data = json.dumps(tree, indent=1).encode()
    return data.removesuffix(_END) + _CHECKSUM + digest_of(data).encode() + b'"' + _END


def is_sealed(data: bytes, path: str) -> bool:
    """Whether a text has such a field; older ones lack it.

    Raises:
        CheckpointError: it has, and it is of another text.
    """
    body, found, end = data.rpartition(_CHECKSUM)
    if found and end != digest_of(body + _END).encode() + b'"' + _END:
        raise CheckpointError(f"{path}: it is not what its SHA-256 says: it was damaged")
    return bool(found)


def digest_of(data: bytes) -> str:
    """The SHA-256 of some bytes, as text."""
    return hashlib.sha256(data).hexdigest()
