"""A job of forty samples, for what is found of a model before it trains."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from protos.job_pb2 import JobSpec


def job_of_samples(folder: Path) -> JobSpec:
    """Three dense columns, two sparse ones of five keys, and a label of 0 or 1, in `folder`."""
    rng = np.random.default_rng(0)
    columns = {f"d{i}": rng.normal(size=40).astype(np.float32) for i in range(3)}
    columns |= {f"s{i}": rng.integers(0, 5, 40).astype(str) for i in range(2)}
    pq.write_table(pa.table({**columns, "label": rng.integers(0, 2, 40)}), folder / "t.parquet")
    spec = JobSpec(directory=str(folder))
    spec.data.train, spec.data.label = "t.parquet", "label"
    spec.data.dense.extend(["d0", "d1", "d2"])
    spec.data.sparse.extend(["s0", "s1"])
    return spec
