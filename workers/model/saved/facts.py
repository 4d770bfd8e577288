"""What model.json says of a saved model, and its dense weights, which are those that it names."""

import json
from collections.abc import Mapping
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from ps.checkpoint.sealed import is_sealed
from ps.checkpoint.store import Store
from ps.errors import CheckpointError
from workers.model.code.entry import ModelError
from workers.model.saved.dense_file import read_from

MODEL = "model.json"  # written last: a folder without it is no model
DENSE = "dense.safetensors"  # in model.json: its SHA-256, which models of before lack


def read_facts(store: Store) -> dict[str, Any]:
    """The fields of model.json.

    Raises:
        ModelError: it is damaged.
        OSError: it cannot be read.
    """
    with store.open(MODEL) as stream:
        data = stream.read()
    try:
        sealed = is_sealed(data, f"{store.url}/{MODEL}")
        facts: dict[str, Any] = dict(json.loads(data))
    except (CheckpointError, TypeError, ValueError) as error:
        raise ModelError(str(error)) from None
    if sealed:
        del facts["sha256"]
    return facts


def read_dense(store: Store, facts: Mapping[str, Any]) -> dict[str, Tensor]:
    """The dense weights by their names in the model.

    Raises:
        ModelError: they are not those that the model was saved with.
        OSError: they cannot be read.
    """
    with store.open(DENSE) as stream:
        try:
            return read_from(stream, lambda digest: check_dense(facts, digest, store.url))
        except SafetensorError as error:
            raise ModelError(f"{store.url}/{DENSE}: {error}") from None


def check_dense(facts: Mapping[str, Any], digest: str, folder: str) -> None:
    """Compare the SHA-256 of the dense weights with that in model.json; raises as `read_dense`."""
    expected = facts.get(DENSE, digest)
    if digest != expected:
        raise ModelError(
            f"{folder}/{DENSE}: SHA-256 is {digest}; {MODEL} says {expected}: it was damaged"
        )
