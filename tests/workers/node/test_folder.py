"""A node that was given no folder leaves none: a killed one's goes when the next one starts."""

import os
import signal
from pathlib import Path

import pytest

from tests.cluster import Roles
from tests.pids import alive
from tests.valkey import Valkey
from tests.waiting import wait_until


@pytest.mark.exhaustive
def test_a_killed_nodes_folder_goes_at_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))

    def folders() -> list[Path]:
        return [path for path in temporary.glob("**/*node-*") if path.is_dir()]

    with Valkey(tmp_path / "valkey") as valkey, Roles(tmp_path, valkey.url) as roles:
        scheduler = roles.scheduler("--artifacts", str(tmp_path / "artifacts"))
        for _ in range(2):
            node = roles.node(scheduler, "cpu", "--node-id", "n", "--units", "1")
            assert len(folders()) == 1
            os.kill(node.pid, signal.SIGKILL)
            wait_until(lambda pid=node.pid: not alive(pid), "it dies")
        roles.node(scheduler, "cpu", "--node-id", "n", "--units", "1")
        assert len(folders()) == 1
    assert folders() == []
