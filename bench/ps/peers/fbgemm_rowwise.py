"""FBGEMM's table-batched embedding on the CPU with row-wise Adagrad: one accumulator a row.

As `fbgemm`, with less to read and write than exact Adagrad: what most who use it run.
"""

from typing import ClassVar

from bench.ps.peers.client import run
from bench.ps.peers.fbgemm import Fbgemm


class FbgemmRowwise(Fbgemm):
    """The same with another optimizer."""

    optimizer: ClassVar[str] = "rowwise_adagrad"


if __name__ == "__main__":
    run(FbgemmRowwise)
