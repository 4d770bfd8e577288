"""A scheduler with a Redis server of its own ends with it, and says why."""

import os
import signal
from pathlib import Path

import redis

from chassis.process import module_argv, spawn


def test_a_scheduler_whose_redis_has_died_serves_no_more(tmp_path: Path) -> None:
    argv = module_argv("scheduler.service", "--directory", str(tmp_path / "data"))
    scheduler = spawn("scheduler", argv, directory=tmp_path)
    try:
        scheduler.wait_ready(60)
        with redis.Redis.from_url(str(scheduler.facts["redis"])) as store:
            os.kill(int(store.info("server")["process_id"]), signal.SIGKILL)
        assert scheduler.process.wait(60) == 1
        assert scheduler.poll() == 1
        assert "has ended" in scheduler.log.read_text()
    finally:
        scheduler.stop()
