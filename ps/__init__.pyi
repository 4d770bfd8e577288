from ps.checkpoint.tables import read_checkpoint as read_checkpoint
from ps.client.dense import DenseParameters as DenseParameters
from ps.client.dense import DensePushPull as DensePushPull
from ps.client.geo import GeoTable as GeoTable
from ps.client.parameter_client import ParameterClient as ParameterClient
from ps.errors import CheckpointError as CheckpointError
from ps.errors import OutcomeUnknownError as OutcomeUnknownError
from ps.errors import ShardError as ShardError
from ps.errors import TableError as TableError
from ps.local.shards import LocalShards as LocalShards
from ps.local.table import LocalTable as LocalTable
from ps.serving.export import export_checkpoint as export_checkpoint
from ps.serving.follower import Follower as Follower
from ps.serving.publisher import Publisher as Publisher
from ps.table.rules import Admission as Admission
from ps.table.rules import Eviction as Eviction
from ps.table.rules import Score as Score
from ps.table.rules import Segment as Segment

__all__ = [
    "Admission",
    "CheckpointError",
    "DenseParameters",
    "DensePushPull",
    "Eviction",
    "Follower",
    "GeoTable",
    "LocalShards",
    "LocalTable",
    "OutcomeUnknownError",
    "ParameterClient",
    "Publisher",
    "Score",
    "Segment",
    "ShardError",
    "TableError",
    "export_checkpoint",
    "read_checkpoint",
]
