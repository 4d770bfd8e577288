"""After an attempt: stopping what runs of it, wherever it runs, and keeping its logs."""

import logging
import time

from scheduler.runs.attempt import Underway
from scheduler.runs.launch import drop_tables, stop_job
from scheduler.state import nodes as registry

GRACE_S = 3.0
_STOP_TRYING_S = 15.0
_log = logging.getLogger("heterps.runner")


def clean_up(underway: Underway, everywhere: bool) -> None:
    """Stop what runs, and keep its logs.

    Args:
        everywhere: also on nodes where the attempt may have been started without our knowing.
    """
    channels, processes = underway.control.channels, underway.processes
    if everywhere:
        _stop_everywhere(underway)
    addresses = [p.node.address for p in processes if not p.standing]
    for silent in stop_job(underway.attempt, addresses, channels, GRACE_S):
        _log.warning("%s", silent)
    standing = [p.address for p in processes if p.standing and p.address]
    for silent in drop_tables(underway.job_id, standing):
        _log.warning("%s", silent)
    underway.logs.set_processes(processes)
    underway.logs.keep()


def _stop_everywhere(underway: Underway) -> None:
    """Stop the attempt on every node that is alive."""
    control, told = underway.control, set[str]()
    until = time.monotonic() + _STOP_TRYING_S
    while time.monotonic() < until:
        left = {n.address for n in control.nodes.live(registry.NODE)} - told
        for address in sorted(left):
            if not stop_job(underway.attempt, [address], control.channels, GRACE_S):
                told.add(address)
        if left <= told:
            return
        time.sleep(0.5)
