"""What counts as a kill of the kernel's for want of memory."""

from pathlib import Path

import pytest

from workers.node import oom
from workers.node.oom import OomKills, oom_kills, sources


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_death_is_the_kernels_only_soon_after_its_count_has_grown(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, count = 100.0, 7
    monkeypatch.setattr(oom.time, "monotonic", lambda: now)
    kills = OomKills(lambda: count)
    assert not kills.lately(), "what was killed before is none of ours"
    count = 8
    kills.look()
    now = 101.0
    assert kills.lately()
    now = 120.0
    assert not kills.lately(), "whoever dies that long after was killed by somebody else"
    count = 9
    assert kills.lately()


@pytest.mark.parametrize(
    ("membership", "file", "text"),
    [
        ("0::/pod/one\n", "pod/one/memory.events.local", "oom 4\noom_kill 3\noom_group_kill 9\n"),
        ("0::/hidden\n", "memory.events", "low 0\noom_kill 3\n"),
        (
            "9:name=systemd:/\n4:memory:/a/b\n0::/\n",
            "memory/a/b/memory.oom_control",
            "under_oom 0\noom_kill 3\n",
        ),
        ("4:cpu,memory:/hidden\n", "memory/memory.oom_control", "oom_kill 3\n"),
    ],
)
def test_it_is_the_count_of_our_own_group(
    tmp_path: Path, membership: str, file: str, text: str
) -> None:
    _write(tmp_path / "groups" / file, text)
    _write(tmp_path / "groups" / "memory.events.elsewhere", "oom_kill 50\n")
    listed = sources(_write(tmp_path / "cgroup", membership), tmp_path / "groups")
    assert oom_kills(listed) == 3


def test_where_there_are_no_groups_it_is_the_hosts(tmp_path: Path) -> None:
    assert sources(tmp_path / "none", tmp_path) == [Path("/proc/vmstat")]
    assert oom_kills([tmp_path / "none"]) == 0
