"""Log lines: text for people as ever, JSON for collectors."""

import json
import logging
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from chassis import logs, process
from chassis.logs import LONGEST, JsonFormatter, log_fields, log_scope

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = r"""
import logging
from chassis.logs import log_fields
from chassis.process import setup_logging
setup_logging("stage 1 worker 0")
log = logging.getLogger("heterps.stage")
log_fields(job="clicks-1", stage=1, worker=0, step=iter(range(7, 99)).__next__)
log.info("pulled %d rows", 3)
log.warning("two\nlines \"quoted\"")
try:
    1 / 0
except ZeroDivisionError:
    log.exception("failed")
logging.getLogger("quiet").debug("not shown")
"""


@pytest.fixture(autouse=True)
def no_fields() -> Iterator[None]:
    logs._process.clear()
    yield
    logs._process.clear()


def written(form: str | None, program: str = PROGRAM) -> "subprocess.CompletedProcess[str]":
    """What a process of that format writes."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith("HETERPS_LOG")}
    environment |= {"HETERPS_LOG_FORMAT": form} if form is not None else {}
    return subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env=environment,
    )


def line(message: str, *arguments: object) -> dict[str, object]:
    """A record, through the formatter and back."""
    record = logging.LogRecord("heterps.x", logging.INFO, "f", 1, message, arguments, None)
    text = JsonFormatter("node cpu").format(record)
    assert "\n" not in text
    found: dict[str, object] = json.loads(text)
    return found


@pytest.mark.parametrize("form", [None, "", "auto", "text"])
def test_text_is_the_default_and_stays_as_it_was(form: str | None) -> None:
    lines = written(form).stderr.splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d I stage 1 worker 0: pulled 3 rows", lines[0])
    assert lines[-1] == "ZeroDivisionError: division by zero"


def test_json_has_one_object_a_line_with_all_that_is_known() -> None:
    first, second, third = (json.loads(one) for one in written("json").stderr.splitlines())
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", first.pop("time"))
    assert first == {
        "level": "info",
        "role": "stage 1 worker 0",
        "logger": "heterps.stage",
        "message": "pulled 3 rows",
        "job": "clicks-1",
        "stage": 1,
        "worker": 0,
        "step": 7,
    }
    assert (second["level"], second["message"], second["step"]) == (
        "warning",
        'two\nlines "quoted"',
        8,
    )
    assert third["message"] == "failed"
    assert third["exception"].startswith("Traceback (most recent call last)")
    assert third["exception"].endswith("ZeroDivisionError: division by zero")


def test_another_format_ends_the_process_and_says_what_is_expected() -> None:
    done = written("xml")
    assert done.returncode == 2
    assert done.stderr == "error: HETERPS_LOG_FORMAT=xml: expected auto, text, json\n"


def test_a_message_that_is_too_long_is_cut_and_says_so() -> None:
    whole = "é" * (LONGEST // 2)
    assert line(whole)["message"] == whole
    cut = str(line(whole + "é")["message"])
    assert cut == f"{whole} … (cut: it has {LONGEST + 2} bytes, {LONGEST} are kept)"
    assert str(line("x" + whole)["message"]).startswith("x" + whole[:-1] + " …"), "no half letter"


def test_a_message_of_any_characters_is_one_line() -> None:
    text = "a\r\nb\u2028c\x00d\ud800e"
    assert line("%s", text)["message"] == text


def test_a_scope_is_of_its_thread_and_block() -> None:
    log_fields(worker=3)
    seen: list[dict[str, object]] = []
    with log_scope(job="a"), log_scope(stage=2):
        other = threading.Thread(target=lambda: seen.append(line("there")))
        other.start()
        other.join()
        here = line("here")
    assert (here["job"], here["stage"], here["worker"]) == ("a", 2, 3)
    assert "job" not in seen[0]
    assert seen[0]["worker"] == 3
    assert "job" not in line("after")


def test_fields_have_known_names() -> None:
    with pytest.raises(ValueError, match="'jobs': expected one of job, stage"):
        log_fields(jobs="a")


def test_what_failed_is_quoted_in_words(tmp_path: Path) -> None:
    failing = PROGRAM + "\nprint('{no json')\nraise SystemExit(3)"
    child = process.spawn(
        "stage",
        [sys.executable, "-c", failing],
        directory=tmp_path,
        environment={"HETERPS_LOG_FORMAT": "json"},
    )
    with pytest.raises(process.ChildError) as raised:
        child.wait_ready(60)
    quoted = str(raised.value).splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d I stage 1 worker 0: pulled 3 rows", quoted[1])
    assert quoted[-2:] == ["ZeroDivisionError: division by zero", "{no json"]


def test_a_shard_of_a_job_says_whose_it_is(tmp_path: Path) -> None:
    argv = process.module_argv("ps.server", "--shard", "1", "--shards", "2", "--job", "clicks-1")
    shard = process.spawn(
        "shard", argv, directory=tmp_path, environment={"HETERPS_LOG_FORMAT": "json"}
    )
    try:
        shard.wait_ready(60)
    finally:
        shard.stop(10)
    lines = [json.loads(one) for one in shard.log.read_text().splitlines()]
    assert {(one["role"], one["job"], one["shard"]) for one in lines} == {("ps 1", "clicks-1", 1)}
    assert "listens on" in lines[0]["message"]
