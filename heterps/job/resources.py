"""Resources files whose figures may come from the catalogue.

A type says `catalogue: v100` to take from the catalogue's entry what it does not give itself:
device, price, memory and peak rates. How many units there are, `limit`, no catalogue knows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from chassis.near import near_or_all
from scheduler import Resources
from scheduler.problem.fields import InputError, read_file
from workers.profiling.catalogue import CatalogueType, load_catalogue

_KEY = "catalogue"


def load_resources(path: str | Path) -> Resources:
    """Read, complete and check a resources file (JSON or YAML).

    Raises:
        InputError: naming file, key, value and what was expected.
    """
    return Resources.parse(completed(read_file(path), str(path)), str(path))


def completed(value: object, source: str = "") -> object:
    """A parsed resources file with the catalogue's figures put in.

    What is no mapping with a list of types is returned as it is: parsing refuses it.

    Raises:
        InputError: a type names an entry that the catalogue has not got.
    """
    if not isinstance(value, Mapping) or not isinstance(value.get("types"), list):
        return value
    types = [_complete(kind, f"types[{i}]", source) for i, kind in enumerate(value["types"])]
    return {**value, "types": types}


def catalogue_resources(names: Sequence[str], limits: Mapping[str, int]) -> Resources:
    """Resources made of catalogue entries alone.

    Args:
        limits: units by device, cpu and cuda.

    Raises:
        InputError: the catalogue has no such entry.
    """
    types: list[Any] = []
    for name in names:
        entry = _entry(name, "", "")
        types.append({"name": name, "limit": limits[entry.device], **entry.resource_fields()})
    return Resources.parse({"types": types}, "the catalogue")


def _complete(kind: object, path: str, source: str) -> object:
    if not isinstance(kind, Mapping) or _KEY not in kind:
        return kind
    entry = _entry(kind[_KEY], f"{path}.{_KEY}", source)
    given = {key: value for key, value in kind.items() if key != _KEY}
    return {"name": entry.name, **entry.resource_fields(), **given}


def _entry(name: object, path: str, source: str) -> CatalogueType:
    known = load_catalogue()
    if not isinstance(name, str) or name not in known:
        hint = near_or_all(name if isinstance(name, str) else "", known)
        raise InputError(source, path, f"{name!r}: expected an entry of the catalogue{hint}")
    return known[name]
