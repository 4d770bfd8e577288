"""Reading Parquet, CSV and TSV into batches of keys, dense inputs, tokens and labels."""

from workers.data.batches import GlobalBatches
from workers.data.columns import Batch
from workers.data.errors import DataError
from workers.data.reader import Dataset

__all__ = ["Batch", "DataError", "Dataset", "GlobalBatches"]
