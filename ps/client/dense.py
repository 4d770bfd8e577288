"""Dense parameters on the parameter server: cut in blocks, a block a row of a table.

So they are spread over the shards, logged, saved, loaded and moved like any rows.
"""

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from math import prod
from secrets import randbits
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from numpy.typing import NDArray

from chassis.near import did_you_mean
from protos import parameter_server_pb2 as pb
from ps.client.parameter_client import ParameterClient
from ps.errors import ShardError, TableError
from ps.table.arrays import Floats, Keys
from ps.table.spec import make_spec

if TYPE_CHECKING:
    from torch import nn

_LOOK_S = 0.05


@dataclass(frozen=True, slots=True)
class _Slice:
    """Where a parameter lies in the flat buffer."""

    shape: tuple[int, ...]
    begin: int
    end: int


class DenseParameters:
    """Named float arrays whose values and optimizer live on the servers; thread-safe.

    Every worker makes it with the same arguments. An optimizer works on each float by itself, so
    cutting changes nothing, but for what is defined by row: `rowwise_adagrad`, `clip_norm`,
    `bound` and `trust_ratio` act on a block.

    Args:
        client: the connections.
        name: the table's; a second one, NAME.origin, tells who initialized it.
        shapes: shape by name, or arrays or tensors, such as a state_dict, of which only the
            shapes are taken.
        optimizer: as of `ps.table.spec.make_spec`.
        learning_rate: likewise.
        block: floats a row; smaller ones spread more evenly over the shards.
        durability: as of `ps.table.spec.make_spec`.
        hyperparameters: of the optimizer.

    Raises:
        TableError: no parameters, one that is not of floats, or what `make_spec` refuses.
        ShardError: the table is there with another spec, or a shard did not answer.
    """

    def __init__(
        self,
        client: ParameterClient,
        name: str,
        shapes: Mapping[str, Any],
        *,
        optimizer: str = "adam",
        learning_rate: float = 1e-3,
        block: int = 1024,
        durability: str = "none",
        **hyperparameters: float | bool | None,
    ) -> None:
        self._client = client
        self.name = name
        self._block = block
        self._durability = durability
        self._slices: dict[str, _Slice] = {}
        self.size = 0
        for key, value in shapes.items():
            shape = _shape_of(name, key, value)
            end = self.size + prod(shape)
            self._slices[key] = _Slice(shape, self.size, end)
            self.size = end
        if not self.size:
            raise TableError(f"dense parameters {name!r}: there are none; expected at least one")
        client.create_table(
            name,
            block,
            optimizer=optimizer,
            learning_rate=learning_rate,
            initializer="zeros",
            durability=durability,
            **hyperparameters,
        )
        self._keys: Keys = np.arange(-(-self.size // block), dtype=np.uint64)

    def initialize(
        self, arrays: Mapping[str, Any], only_if_new: bool = True, timeout_s: float = 60.0
    ) -> bool:
        """Write first values; of workers that do so together the first wins, for all parameters.

        Returns once all values are there, whoever wrote them, so that a pull may follow.

        Args:
            arrays: by name, NumPy or torch.
            only_if_new: leave values alone that are there already, also those of a checkpoint.
            timeout_s: how long to wait for the worker that won.

        Returns:
            Whether these values were written.

        Raises:
            TableError: names, shapes or dtypes that do not fit; nothing was written.
            ShardError: a shard did not answer or refused.
            TimeoutError: the worker that won did not finish.
        """
        flat = self._flat(arrays)
        if only_if_new and not self._claim_initialization():
            self._wait_for_values(timeout_s)
            return False
        self._client.assign(self.name, self._keys, flat)
        return True

    def pull(self) -> dict[str, Floats]:
        """The values, float32 by name: views into one buffer of the caller's own."""
        rows = self._client.pull_unique(self.name, self._keys).reshape(-1)
        return {
            key: rows[part.begin : part.end].reshape(part.shape)
            for key, part in self._slices.items()
        }

    def push(self, grads: Mapping[str, Any], *, rate: float = 1.0) -> None:
        """Apply gradients, exactly once; returns once every shard has acknowledged.

        Args:
            grads: by name, NumPy or torch; None, as of a parameter that took no part, is zero.
            rate: times the learning rate.

        Raises:
            TableError: names, shapes or dtypes that do not fit; nothing was applied.
            ShardError: a shard did not answer or refused.
        """
        self.push_async(grads, rate=rate).result()

    def push_async(self, grads: Mapping[str, Any], *, rate: float = 1.0) -> "Future[None]":
        """`push` as a future; the arrays may be reused as soon as this returns."""
        flat = self._flat(grads)
        return self._client.push_async(self.name, self._keys, flat, distinct=True, rate=rate)

    def _flat(self, arrays: Mapping[str, Any]) -> Floats:
        """All arrays in one buffer, padded: float32 [blocks, block]."""
        missing = [key for key in self._slices if key not in arrays]
        strange = [key for key in arrays if key not in self._slices]
        if missing or strange:
            wrong = f"lacks {missing[0]!r}" if missing else f"has {strange[0]!r} besides"
            hint = "" if missing else did_you_mean(strange[0], list(self._slices))
            raise TableError(
                f"dense parameters {self.name!r}: {wrong}{hint}; expected exactly the "
                f"{len(self._slices)} names given at the start"
            )
        flat = np.zeros(len(self._keys) * self._block, np.float32)
        for key, part in self._slices.items():
            if arrays[key] is None:
                continue
            array = _to_numpy(self.name, key, arrays[key])
            if array.shape != part.shape:
                raise TableError(
                    f"dense parameters {self.name!r}: {key!r} has shape {list(array.shape)}; "
                    f"expected {list(part.shape)}"
                )
            with np.errstate(over="ignore"):  # beyond float32 becomes infinite and is refused
                flat[part.begin : part.end] = array.reshape(-1)
        return flat.reshape(-1, self._block)

    def _claim_initialization(self) -> bool:
        """Whether this worker is to write the values.

        A table is made once, and with the same spec again any number of times: the seed of a
        table of one shard is the name of the worker that made it.
        """
        if len(self._pushed_keys()) == len(self._keys):
            return False
        spec = make_spec(
            f"{self.name}.origin",
            1,
            optimizer="sgd",
            initializer="zeros",
            seed=randbits(63),
            durability=self._durability,
        )
        shard = self._client.session().shards[0]
        request = pb.CreateTableRequest(table=spec)
        try:
            shard.call(shard.stub.CreateTable, request, f"CreateTable of {spec.name!r}")
        except ShardError as error:
            if error.code is grpc.StatusCode.FAILED_PRECONDITION:
                return False
            raise
        return True

    def _pushed_keys(self) -> Keys:
        return self._client.keys(self.name, len(self._keys))

    def _wait_for_values(self, timeout_s: float) -> None:
        limit = time.monotonic() + timeout_s
        while (found := len(self._pushed_keys())) < len(self._keys):
            if time.monotonic() > limit:
                raise TimeoutError(
                    f"dense parameters {self.name!r}: another worker began to initialize them and "
                    f"has written {found} of {len(self._keys)} blocks; expected all within "
                    f"{timeout_s:g} s. If it died, initialize with only_if_new=False"
                )
            time.sleep(_LOOK_S)


class DensePushPull:
    """An nn.Module whose trainable parameters live on the servers.

    Args:
        client, name: as of DenseParameters.
        module: the first worker's values become everybody's.
        options: of DenseParameters: optimizer, learning_rate, ...
    """

    def __init__(
        self, client: ParameterClient, name: str, module: "nn.Module", **options: Any
    ) -> None:
        self._parameters = {k: p for k, p in module.named_parameters() if p.requires_grad}
        self.dense = DenseParameters(client, name, self._parameters, **options)
        self.dense.initialize(self._parameters)
        self.pull()

    def pull(self) -> None:
        """Take the servers' values into the module."""
        import torch

        values = self.dense.pull()
        with torch.no_grad():
            for key, parameter in self._parameters.items():
                parameter.copy_(torch.from_numpy(values[key]))

    def push(self, *, rate: float = 1.0) -> None:
        """Push the gradients that backward left, and clear them."""
        self.push_async(rate=rate).result()

    def push_async(self, *, rate: float = 1.0) -> "Future[None]":
        """`push` as a future; the gradients are cleared at once."""
        pushed = self.dense.push_async(
            {key: parameter.grad for key, parameter in self._parameters.items()}, rate=rate
        )
        for parameter in self._parameters.values():
            parameter.grad = None
        return pushed


def _shape_of(name: str, key: str, value: Any) -> tuple[int, ...]:
    """The shape that a value is or has."""
    if hasattr(value, "shape"):
        dtype = str(value.dtype).removeprefix("torch.")
        if "float" not in dtype:
            raise TableError(
                f"dense parameters {name!r}: {key!r} is of {dtype}; expected floats: leave out "
                "what is not trained"
            )
        return tuple(int(n) for n in value.shape)
    if isinstance(value, int):
        return (value,)
    if isinstance(value, Sequence) and all(isinstance(n, int) and n >= 0 for n in value):
        return tuple(value)
    raise TableError(
        f"dense parameters {name!r}: {key!r} is {value!r}; expected a shape, an array or a tensor"
    )


def _to_numpy(name: str, key: str, value: Any) -> NDArray[Any]:
    if hasattr(value, "detach"):  # a torch tensor, without importing torch
        value = value.detach()
        if value.is_floating_point():
            value = value.float()  # NumPy has no bfloat16
        value = value.cpu().numpy()
    array: NDArray[Any] = np.asarray(value)
    if array.dtype.kind != "f":
        raise TableError(
            f"dense parameters {name!r}: {key!r} is of {array.dtype}; expected floats (float32)"
        )
    return array
