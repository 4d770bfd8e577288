"""The storage plane: embedding tables in CPU memory, sharded over server processes."""

from chassis.lazy import attach

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "ps.checkpoint.tables": ("read_checkpoint",),
        "ps.client.dense": (
            "DenseParameters",
            "DensePushPull",
        ),
        "ps.client.geo": ("GeoTable",),
        "ps.client.parameter_client": ("ParameterClient",),
        "ps.errors": (
            "CheckpointError",
            "ShardError",
            "TableError",
        ),
        "ps.local.shards": ("LocalShards",),
        "ps.local.table": ("LocalTable",),
        "ps.serving.export": ("export_checkpoint",),
        "ps.serving.follower": ("Follower",),
        "ps.serving.publisher": ("Publisher",),
        "ps.table.rules": (
            "Admission",
            "Eviction",
            "Score",
            "Segment",
        ),
    },
)
