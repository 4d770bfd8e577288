"""Samples of the job's own code: what `data.source` returns, a dict of values by column each."""

import json
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
from torch.utils.data import IterableDataset

from chassis import scratch
from chassis.entries import EntryError, load_entry
from protos.job_pb2 import DataSpec
from workers.data.columns.arrays import Encoder
from workers.data.errors import DataError, column_hint
from workers.data.files import remote
from workers.data.files.unit import Unit
from workers.data.files.values import UNFIT, column_of, plain, same
from workers.data.joins import Joined
from workers.data.own.positions import Position, Positions
from workers.data.own.states import decoded, encoded

KEY: Final = "data.source"
_UNIT_ROWS = 1024  # of samples that can be asked for by their index
_BLOCK_ROWS = 256  # samples held as Python objects
_BETWEEN = 4096  # samples between two positions of an iterable that are kept, at least
_MOST_STATE = 1 << 19
_REPEATED = 32  # samples at each end that are made twice, to see whether they are the same
_log = logging.getLogger("heterps.data")


@dataclass(frozen=True, slots=True)
class _Facts:
    """What every process has to know of a split, and one finds out.

    Args:
        rows: None of an iterable that does not say.
        by_index: whether samples can be asked for in any order.
        tokens: of a list of `data.tokens`.
    """

    rows: int | None
    by_index: bool
    tokens: int


class OwnBlocks:
    """The samples of a map-style dataset or of an iterable.

    It is made anew for every pass over an iterable, and once in a process that reads by index.

    Args:
        spec: whose `source` is called with the folder of the data and `name`.
        name: what the job says of the split, such as its `data.train`.
        directory: the folder of the job file.

    Raises:
        DataError: the source is not there, fails, or returns nothing that has samples.
    """

    def __init__(self, spec: DataSpec, name: str, directory: Path) -> None:
        self.where = f"{spec.source}({name!r})"
        self._name = name
        self._path = (
            spec.path if remote.is_url(spec.path) else str((directory / spec.path).resolve())
        )
        self._tokens = spec.tokens
        try:
            self._source = load_entry(spec.source, directory, KEY)
        except EntryError as error:
            raise DataError("job", KEY, spec.source, f"a callable ({error})") from error.__cause__
        code = directory / spec.source.partition(":")[0]
        self.identity = [KEY, spec.source, name, self._path, code.stat().st_mtime_ns]
        self._made: Any = None  # that is read by index
        self._passed: Iterator[Any] | None = None  # the last that can be read but once
        self._is_silent = False  # about where it is
        shared = scratch.own()
        self._place = shared / f"source-{self._identity_digest}" if shared is not None else None
        self._positions = Positions(self._place and self._place.with_suffix(".positions"))
        self._facts = self._shared_facts()
        self.units = self._units()

    def contents(self, columns: Sequence[str]) -> str:
        """As of `Blocks`: how many there are, the first and, read by index, the last ones."""
        found: list[object] = [self._facts.rows]
        if self._facts.by_index:
            if self._made is None:
                self._made = self._make()
            rows = range(self._facts.rows or 0)
            some = sorted({*rows[:1], *rows[len(rows) // 2 :][:1], *rows[-1:]})
            for row in some:
                samples = self._by_index(self._made, range(row, row + 1))
                found += [self._digest(one, columns, row) for one in samples]
        else:
            samples = islice(self._in_order(self._make()), 1)
            found += [self._digest(one, columns, 0) for one in samples]
        return sha256(repr(found).encode()).hexdigest()[:32]

    @property
    def _identity_digest(self) -> str:
        return sha256(repr(self.identity).encode()).hexdigest()[:32]

    @property
    def is_countable(self) -> bool:
        """Whether it says how many samples it has."""
        return self._facts.rows is not None

    @property
    def uncounted(self) -> str:
        """As of `Blocks`."""
        return f"{self.where} has no __len__, so nobody knows how many samples it has"

    def known_rows(self, unit: Unit) -> int | None:
        """As of `Blocks`."""
        return unit.rows

    def check(self, encoder: Encoder, joined: Joined | None = None) -> None:
        """As of `Blocks`: types are looked at as samples are read, since each may have its own."""
        if encoder.tokens:
            encoder.tokens.width = self._facts.tokens

    def check_values(self, encoder: Encoder, columns: Sequence[str]) -> None:
        """Raises `DataError` where it does not give the same samples again.

        Others read them on other hosts, or after a restart, and inputs would part with labels.
        """
        for one, other in zip(self._ends(columns), self._ends(columns), strict=True):
            for name in columns:
                if not same(one.column(name), other.column(name)):
                    expected = "the same samples each time that it is made: seed what it draws"
                    raise DataError(self.where, KEY, f"other values of {name}", expected)
        if not self._facts.by_index:
            self._check_state(columns)

    def _check_state(self, columns: Sequence[str]) -> None:
        """Raises `DataError` where it goes on elsewhere than where it said that it was."""
        made = self._make()
        samples = self._in_order(made)
        at = len(list(islice(samples, _REPEATED)))
        state = self._state(made)
        following = [self._digest(one, columns, at) for one in islice(samples, 1)]
        if state is not None and following:
            other = self._make()
            self._set_state(other, Position(at, state, following[0]))
            others = islice(self._in_order(other, at), 1)
            found = [self._digest(one, columns, at) for one in others]
            if found != following:
                expected = (
                    "after load_state_dict the sample that followed when state_dict was called"
                )
                raise DataError(f"{self.where}[{at}]", KEY, "another one", expected)

    def read(
        self, unit: Unit, columns: Sequence[str], rows: int, start: int
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        """As of `Blocks`; an iterable that has said where it was goes on from there."""
        most = min(rows, _BLOCK_ROWS)
        if self._facts.by_index:
            if self._made is None:
                self._made = self._make()
            assert unit.rows is not None
            at, samples = 0, self._by_index(self._made, range(unit.first, unit.first + unit.rows))
            while some := list(islice(samples, most)):
                yield at, self._block(some, columns, unit.first + at)
                at += len(some)
            return
        made, known = self._make(), self._positions.before(start)
        if known.row:
            self._set_state(made, known)
        at, samples = known.row, self._in_order(made, known.row)
        while True:
            next_told = self._positions.last + _BETWEEN * self._positions.sparsity
            state = self._state(made) if at >= next_told else None
            some = list(islice(samples, most))
            digest = known.digest if at == known.row else ""
            if digest and (not some or self._digest(some[0], columns, at) != digest):
                expected = f"after load_state_dict the sample that followed row {at} before"
                raise DataError(self.where, KEY, "another one", expected)
            if not some:
                break
            if state is not None:
                self._positions.add(Position(at, state, self._digest(some[0], columns, at)))
            yield at, self._block(some, columns, at)
            at += len(some)
        if self._positions.rows not in (0, at):
            expected = f"{self._positions.rows}, as before"
            raise DataError(self.where, "contents", f"{at} rows", expected)
        if not self._positions.rows:
            self._positions.add(Position(0, None, "", at))

    @property
    def pass_rows(self) -> int:
        """As of `Blocks`."""
        self._positions.before(0)
        return self._positions.rows

    def position(self, row: int) -> str:
        """As of `Blocks`."""
        found = self._positions.before(row)
        rows = self._positions.rows
        return replace(found, rows=rows).written() if found.row or rows else ""

    def go_on(self, position: str) -> None:
        """As of `Blocks`."""
        self._positions.add(Position(**json.loads(position)))

    def _state(self, made: Any) -> Any:
        """What it says of where it is; None where it says nothing that can be kept."""
        if self._is_silent or not hasattr(made, "state_dict"):
            return None
        try:
            found = made.state_dict()
        except Exception as error:
            raise self._failed("state_dict", error) from error
        try:
            kept = encoded(found)
            if kept is None:
                raise TypeError("expected a state")
            if (size := len(json.dumps(kept))) > _MOST_STATE:
                raise ValueError(f"{size} characters of JSON, expected at most {_MOST_STATE}")
        except (TypeError, ValueError, RecursionError) as error:
            _log.warning("%s: state_dict is passed over: %s", self.where, error)
            self._is_silent = True
            return None
        return kept

    def _set_state(self, made: Any, known: Position) -> None:
        try:
            made.load_state_dict(decoded(known.state))
        except Exception as error:
            raise self._failed("load_state_dict", error) from error

    def _digest(self, sample: Any, columns: Sequence[str], row: int) -> str:
        """Of the values that are read of a sample."""
        found = []
        for name in sorted(columns):
            value = self._value(sample, name, row)
            if isinstance(value, np.ndarray):  # whose repr leaves out; of objects bytes are places
                exact = (value.shape, value.dtype.str, value.tobytes())
                value = value.tolist() if value.dtype.hasobject else exact
            found.append(value)
        return sha256(repr(found).encode()).hexdigest()

    def _units(self) -> list[Unit]:
        path, rows = Path(self.where), self._facts.rows
        if rows is None or not self._facts.by_index:
            return [Unit(path, None, rows)]
        firsts = range(0, rows, _UNIT_ROWS)
        return [Unit(path, None, min(_UNIT_ROWS, rows - first), first) for first in firsts]

    def _shared_facts(self) -> _Facts:
        if self._place is None:
            return self._find_facts()
        path = self._place.with_suffix(".json")

        def write(to: Path) -> None:
            to.write_text(json.dumps(asdict(self._find_facts())))

        try:
            scratch.once(path, write)
            return _Facts(**json.loads(path.read_text()))
        except OSError:
            return self._find_facts()

    def _find_facts(self) -> _Facts:
        made = self._make()
        by_index = hasattr(made, "__getitem__") and hasattr(made, "__len__")
        by_index = by_index and not isinstance(made, IterableDataset)  # which inherits the former
        if not by_index and not isinstance(made, Iterable):
            expected = "a dataset with __len__ and __getitem__, or an iterable, of dicts"
            raise DataError(self.where, KEY, type(made).__name__, expected)
        rows: int | None = None
        if hasattr(made, "__len__"):
            try:
                rows = len(made)
            except TypeError:  # a DataLoader of an iterable that does not know
                rows = None
            except Exception as error:
                raise self._failed("len", error) from error
        tokens = 0
        if self._tokens:
            samples = self._by_index(made, range(rows or 0)) if by_index else self._in_order(made)
            for sample in islice(samples, 1):
                tokens = len(self._value(sample, self._tokens, 0))
        return _Facts(rows, by_index and rows is not None, tokens)

    def _make(self) -> Any:
        try:
            made = self._source(self._path, self._name)
        except MemoryError:
            raise
        except Exception as error:
            raise self._failed("call", error) from error
        if isinstance(made, Iterator):
            if made is self._passed:
                expected = "a new iterator each time that it is called"
                raise DataError(self.where, KEY, type(made).__name__, expected)
            self._passed = made
        return made

    def _by_index(self, made: Any, rows: range) -> Iterator[Any]:
        for row in rows:
            try:
                yield made[row]
            except MemoryError:
                raise
            except Exception as error:
                raise self._failed(row, error) from error

    def _in_order(self, made: Any, row: int = 0) -> Iterator[Any]:
        try:
            for sample in made:
                yield sample
                row += 1
        except MemoryError:
            raise
        except Exception as error:
            raise self._failed(row, error) from error

    def _failed(self, at: int | str, error: Exception) -> DataError:
        where = f"{self.where}[{at}]" if isinstance(at, int) else self.where
        expected = "a sample" if isinstance(at, int) else f"a {at} without an error"
        return DataError(where, KEY, f"{type(error).__name__}: {error}", expected)

    def _ends(self, columns: Sequence[str]) -> list[pa.RecordBatch]:
        """The first samples of a new one, and the last where they can be asked for."""
        made, rows = self._make(), self._facts.rows or 0
        if not self._facts.by_index:
            return [self._block(list(islice(self._in_order(made), _REPEATED)), columns, 0)]
        parts = [range(min(rows, _REPEATED)), range(max(0, rows - _REPEATED), rows)]
        return [self._block(list(self._by_index(made, p)), columns, p.start) for p in parts]

    def _block(self, samples: Sequence[Any], columns: Sequence[str], first: int) -> pa.RecordBatch:
        arrays = []
        for name in columns:
            values = [self._value(one, name, first + at) for at, one in enumerate(samples)]
            try:
                arrays.append(column_of(values))
            except UNFIT as error:
                at = f"{self.where}[{first}:{first + len(samples)}]"
                raise DataError(at, f"{KEY}: {name}", str(error), "values of one type") from error
        return pa.record_batch(arrays, list(columns))

    def _value(self, sample: Any, name: str, row: int) -> Any:
        at = f"{self.where}[{row}]"
        if not isinstance(sample, Mapping):
            raise DataError(at, KEY, type(sample).__name__, "a dict of values by name")
        if name not in sample:
            hint = column_hint(name, map(str, sample))
            raise DataError(at, KEY, name, f"a value of the sample; {hint}")
        return plain(sample[name])
