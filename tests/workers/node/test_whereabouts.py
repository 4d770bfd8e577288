"""A node that is started together with its scheduler learns from that where it is."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from chassis.process import announce
from workers.node.whereabouts import WhereaboutsError, announced


def test_it_waits_for_the_announcement(tmp_path):
    file = tmp_path / "ready.json"
    with ThreadPoolExecutor(1) as beside:
        found = beside.submit(announced, file, 60.0, threading.Event())
        announce(file, address="127.0.0.1:4242")
        assert found.result() == "127.0.0.1:4242"


def test_a_scheduler_that_keeps_silent_is_an_error(tmp_path):
    file = tmp_path / "ready.json"
    with pytest.raises(WhereaboutsError, match=r"ready\.json: no scheduler .* within 0\.05 s"):
        announced(file, 0.05, threading.Event())


def test_who_is_told_to_stop_waits_no_longer(tmp_path):
    stop = threading.Event()
    stop.set()
    assert announced(tmp_path / "ready.json", 600.0, stop) == ""


@pytest.mark.parametrize("told", ["{", "[]", "{}", json.dumps({"address": 7}), '{"address": ""}'])
def test_what_is_no_announcement_is_refused(tmp_path, told):
    file = tmp_path / "ready.json"
    file.write_text(told)
    with pytest.raises(WhereaboutsError, match=r"--found-in .*ready\.json"):
        announced(file, 60.0, threading.Event())


def test_a_pipe_in_its_place_blocks_nobody(tmp_path):
    os.mkfifo(tmp_path / "ready.json")
    with pytest.raises(WhereaboutsError, match="regular file"):
        announced(tmp_path / "ready.json", 60.0, threading.Event())
