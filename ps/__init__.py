"""The storage plane: embedding tables in CPU memory, sharded over server processes."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ps.client import ParameterClient as ParameterClient
    from ps.dense import DenseParameters as DenseParameters
    from ps.dense import DensePushPull as DensePushPull
    from ps.errors import CheckpointError as CheckpointError
    from ps.errors import ShardError as ShardError
    from ps.errors import TableError as TableError
    from ps.export import export_checkpoint as export_checkpoint
    from ps.follow import Follower as Follower
    from ps.geo import GeoTable as GeoTable
    from ps.local import LocalShards as LocalShards
    from ps.publish import Publisher as Publisher
    from ps.table import LocalTable as LocalTable

# Loaded on first use, so that `import ps` costs neither NumPy nor gRPC.
_HOMES = {
    "CheckpointError": "ps.errors",
    "DenseParameters": "ps.dense",
    "DensePushPull": "ps.dense",
    "Follower": "ps.follow",
    "GeoTable": "ps.geo",
    "LocalShards": "ps.local",
    "LocalTable": "ps.table",
    "ParameterClient": "ps.client",
    "Publisher": "ps.publish",
    "ShardError": "ps.errors",
    "TableError": "ps.errors",
    "export_checkpoint": "ps.export",
}
__all__ = [
    "CheckpointError",
    "DenseParameters",
    "DensePushPull",
    "Follower",
    "GeoTable",
    "LocalShards",
    "LocalTable",
    "ParameterClient",
    "Publisher",
    "ShardError",
    "TableError",
    "export_checkpoint",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'ps' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value
