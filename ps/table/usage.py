"""How often keys were seen, for admission and eviction."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from protos import parameter_server_pb2 as pb
from ps.errors import TableError
from ps.table.spec import wants_usage


@dataclass(frozen=True, slots=True)
class Usage:
    """How often keys were shown and clicked: float32 [2, n], or none where it is not wanted."""

    values: NDArray[np.float32] | None

    @classmethod
    def of(cls, spec: pb.TableSpec, shows: Any, clicks: Any, shape: tuple[int, ...]) -> "Usage":
        """As given, checked; one show each unless given.

        Raises:
            TableError: not one number for each key, or negative, or not finite.
        """
        count = int(np.prod(shape, dtype=np.int64))
        if not wants_usage(spec):
            if shows is not None or clicks is not None:
                raise TableError(
                    f"table {spec.name!r}: shows and clicks given; expected a table with a score, "
                    "an admission, lazy segments or max_rows"
                )
            return cls(None)
        values = np.zeros((2, count), np.float32)
        values[0] = 1.0
        for row, name, given in ((0, "shows", shows), (1, "clicks", clicks)):
            if given is None:
                continue
            array = np.asarray(given, dtype=np.float32)
            if array.size != count:
                raise TableError(
                    f"table {spec.name!r}: {name} has {array.size} values; expected {count}, one "
                    "for each key"
                )
            if not (np.isfinite(array).all() and (array >= 0).all()):
                raise TableError(f"table {spec.name!r}: {name}: expected finite numbers >= 0")
            values[row] = array.reshape(-1)
        return cls(values)

    def merged(self, inverse: NDArray[np.int64], distinct: int) -> "Usage":
        """Summed over equal keys."""
        if self.values is None:
            return self
        sums = [np.bincount(inverse, weights=row, minlength=distinct) for row in self.values]
        return Usage(np.ascontiguousarray(np.stack(sums), dtype=np.float32))
