"""Keyed jagged tensors as TorchRec has them, for where TorchRec is not installed.

The classes have the names, constructor arguments and methods of TorchRec's that the embedding
collections use. The collections take TorchRec's own as well and then return TorchRec's own.
"""

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Jagged(Protocol):
    """A feature of a batch: bag b is `lengths()[b]` of `values()`, in order."""

    def values(self) -> Tensor:
        """All bags one after another."""
        ...

    def lengths(self) -> Tensor:
        """Values in each bag."""
        ...

    def weights_or_none(self) -> Tensor | None:
        """A weight for each value."""
        ...


class KeyedJagged(Protocol):
    """Features of a batch by name: TorchRec's KeyedJaggedTensor or the one here."""

    def keys(self) -> Sequence[str]:
        """The features' names."""
        ...

    def to_dict(self) -> Mapping[str, Jagged]:
        """Features by name."""
        ...


class JaggedTensor:
    """One feature of a batch.

    Args:
        values: [N, ...], all bags one after another.
        weights: [N], or None.
        lengths: int [B].
        offsets: int [B + 1], where bags begin; either these or the lengths.
    """

    def __init__(
        self,
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._values, self._weights = values, weights
        self._lengths = _lengths("JaggedTensor", lengths, offsets)

    def values(self) -> Tensor:
        """[N, ...], all bags one after another."""
        return self._values

    def lengths(self) -> Tensor:
        """Values in each bag, [B]."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where bags begin, [B + 1]."""
        return _offsets(self._lengths)

    def weights_or_none(self) -> Tensor | None:
        """A weight for each value, [N]."""
        return self._weights


class KeyedJaggedTensor:
    """The sparse features of a batch of B samples: F features with a bag of ids a sample.

    Args:
        keys: names of the F features.
        values: [N] ids, int64; feature after feature, and in it bag after bag.
        weights: float [N], or None.
        lengths: int [F * B], in the order of `values`.
        offsets: int [F * B + 1], where bags begin; either these or the lengths.

    Raises:
        ValueError: the parts do not fit together.
    """

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        weights: Tensor | None = None,
        lengths: Tensor | None = None,
        offsets: Tensor | None = None,
    ) -> None:
        self._keys, self._values, self._weights = list(keys), values, weights
        self._lengths = _lengths("KeyedJaggedTensor", lengths, offsets)
        self._features: dict[str, JaggedTensor] | None = None
        if len(set(self._keys)) < max(1, len(self._keys)):
            raise ValueError(f"KeyedJaggedTensor: keys={self._keys}; expected distinct names")
        if self._lengths.numel() % len(self._keys):
            raise ValueError(
                f"KeyedJaggedTensor: {self._lengths.numel()} bags; expected a multiple of "
                f"{len(self._keys)} (keys)"
            )
        if weights is not None and weights.shape != values.shape:
            raise ValueError(
                f"KeyedJaggedTensor: weights: shape {list(weights.shape)}; "
                f"expected {list(values.shape)}, one for each value"
            )

    def keys(self) -> list[str]:
        """Names of the features."""
        return self._keys

    def values(self) -> Tensor:
        """Ids, [N]."""
        return self._values

    def lengths(self) -> Tensor:
        """Values in each bag, [F * B]."""
        return self._lengths

    def offsets(self) -> Tensor:
        """Where bags begin, [F * B + 1]."""
        return _offsets(self._lengths)

    def weights_or_none(self) -> Tensor | None:
        """A weight for each value, [N]."""
        return self._weights

    def stride(self) -> int:
        """B, the number of samples."""
        return self._lengths.numel() // len(self._keys)

    def to_dict(self) -> dict[str, JaggedTensor]:
        """Features by name, without a copy.

        Raises:
            ValueError: the lengths do not add up to the number of values.
        """
        if self._features is None:
            lengths = self._lengths.view(len(self._keys), -1)
            sizes = lengths.sum(dim=1).tolist()
            if sum(sizes) != len(self._values):
                raise ValueError(
                    f"KeyedJaggedTensor: {len(self._values)} values; expected {sum(sizes)}, "
                    "the sum of the lengths"
                )
            values = self._values.split(sizes)
            weights = [None] * len(sizes) if self._weights is None else self._weights.split(sizes)
            self._features = {
                key: JaggedTensor(v, w, n)
                for key, v, w, n in zip(self._keys, values, weights, lengths, strict=True)
            }
        return self._features

    def __getitem__(self, key: str) -> JaggedTensor:
        return self.to_dict()[key]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> "KeyedJaggedTensor":
        """A copy on `device`."""
        weights = self._weights
        return KeyedJaggedTensor(
            self._keys,
            self._values.to(device, non_blocking=non_blocking),
            None if weights is None else weights.to(device, non_blocking=non_blocking),
            self._lengths.to(device, non_blocking=non_blocking),
        )


class KeyedTensor:
    """Pooled embeddings side by side: `keys()[i]` has `length_per_key()[i]` columns.

    Args:
        keys: their names.
        length_per_key: columns of each.
        values: [B, sum of length_per_key].
    """

    def __init__(self, keys: Sequence[str], length_per_key: Sequence[int], values: Tensor) -> None:
        self._keys, self._length_per_key = list(keys), list(length_per_key)
        self._values = values

    def keys(self) -> list[str]:
        """Names, in the order of the columns."""
        return self._keys

    def values(self) -> Tensor:
        """All columns, [B, sum of length_per_key]."""
        return self._values

    def length_per_key(self) -> list[int]:
        """Columns of each name."""
        return self._length_per_key

    def to_dict(self) -> dict[str, Tensor]:
        """Columns by name, without a copy."""
        parts = self._values.split(self._length_per_key, dim=1)
        return dict(zip(self._keys, parts, strict=True))

    def __getitem__(self, key: str) -> Tensor:
        return self.to_dict()[key]


def classes_like(features: KeyedJagged) -> Any:
    """Where to find the KeyedTensor and JaggedTensor that belong to `features`."""
    if any(cls.__module__.startswith("torchrec.") for cls in type(features).__mro__):
        return import_module("torchrec.sparse.jagged_tensor")
    return import_module(__name__)


def _lengths(owner: str, lengths: Tensor | None, offsets: Tensor | None) -> Tensor:
    if lengths is not None and offsets is None:
        return lengths.reshape(-1)
    if offsets is not None and lengths is None and offsets.dim() == 1 and len(offsets):
        return offsets.diff()
    raise ValueError(f"{owner}: expected either lengths or offsets, [bags + 1]")


def _offsets(lengths: Tensor) -> Tensor:
    return F.pad(lengths.cumsum(0), (1, 0))
