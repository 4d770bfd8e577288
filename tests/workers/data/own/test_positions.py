"""Positions of an iterable: the nearest one before a row, in bounded memory."""

from workers.data.own import positions
from workers.data.own.positions import Position, Positions


def rows_of(found, rows):
    return [found.before(row).row for row in range(rows)]


def test_a_long_pass_keeps_fewer_of_them_and_never_one_from_behind(tmp_path, monkeypatch):
    monkeypatch.setattr(positions, "_MOST", 20_000)
    own, other = Positions(tmp_path / "told"), Positions(tmp_path / "told")
    row, told = 0, []
    while row < 5000:
        row += own.sparsity
        own.add(Position(row, "s" * 500, "d"))
        told.append(row)
    for found in (own, other):
        at = rows_of(found, 5000)
        kept = set(at)
        assert kept <= {0, *told}
        assert all(one <= row for row, one in enumerate(at))
        assert 8 < len(kept) <= 40  # each has more than 500 characters
        gaps = [row - one for row, one in enumerate(at)]
        assert max(gaps) <= 5000 / 4
    assert own.last == other.last == told[-1]


def test_all_are_kept_as_long_as_they_are_few(tmp_path):
    own = Positions(tmp_path / "told")
    for row in range(10, 1000, 10):
        own.add(Position(row, {"at": row}, "d"))
    assert rows_of(Positions(tmp_path / "told"), 1000) == [row // 10 * 10 for row in range(1000)]
    assert own.sparsity == 1
