"""Reading Parquet, CSV and TSV into batches of keys, dense inputs, tokens and labels.

Names are imported when they are first used: who looks at files or makes keys needs no torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from workers.data.batches import GlobalBatches
    from workers.data.columns.arrays import Batch
    from workers.data.errors import DataError
    from workers.data.reader import Dataset

__all__ = ["Batch", "DataError", "Dataset", "GlobalBatches"]
_HOMES: Final = {
    "Batch": "workers.data.columns.arrays",
    "DataError": "workers.data.errors",
    "Dataset": "workers.data.reader",
    "GlobalBatches": "workers.data.batches",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
