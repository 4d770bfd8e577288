"""The storage plane: embedding tables in CPU memory, sharded over server processes."""

import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(_ROOT))  # a script may lie beside a `chassis` of its own
try:
    from chassis.lazy import attach
except ModuleNotFoundError:
    raise ImportError(
        f"{sys.modules['chassis'].__file__}: imported as 'chassis', where HeterPS needs its own, "
        f"at {_ROOT / 'chassis'}; rename yours, or move it into a package of another name"
    ) from None
finally:
    del sys.path[0]

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ps.checkpoint.tables": ("read_checkpoint",),
        "ps.client.dense": ("DenseParameters", "DensePushPull"),
        "ps.client.geo": ("GeoTable",),
        "ps.client.parameter_client": ("ParameterClient",),
        "ps.errors": ("CheckpointError", "OutcomeUnknownError", "ShardError", "TableError"),
        "ps.local.shards": ("LocalShards",),
        "ps.local.table": ("LocalTable",),
        "ps.serving.export": ("export_checkpoint",),
        "ps.serving.follower": ("Follower",),
        "ps.serving.publisher": ("Publisher",),
        "ps.table.rules": ("Admission", "Eviction", "Score", "Segment"),
    },
)
