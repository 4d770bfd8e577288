"""Stopping what runs of an attempt: workers that it has no more, and all when it is over."""

import logging
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from protos.decision_pb2 import Decision
from scheduler.runs.attempt import Attempt
from scheduler.runs.calls import Interrupted
from scheduler.runs.launch import drop_tables, output_of, stop_job
from scheduler.runs.processes import Process
from scheduler.runs.states import State
from scheduler.state import nodes as registry

GRACE_S = 3.0
_STOP_TRYING_S = 15.0
_STEADY_STEPS = 20  # by which what was promised is judged
_log = logging.getLogger("heterps.runner")


def clean_up(attempt: Attempt, *, finished: bool) -> None:
    """Stop what runs, also where it may run without our knowing, and keep its logs.

    Args:
        finished: it has succeeded; else half a model may be left, which goes.
    """
    channels, processes = attempt.context.channels, attempt.processes
    if attempt.may_run_unseen:
        _stop_everywhere(attempt)
    everybody = (*processes, *attempt.record.others, *attempt.logs.processes())
    addresses = [p.node.address for p in everybody if not p.standing]
    came_to = kept_promise(attempt.decision)
    silent = stop_job(attempt.id, addresses, channels, GRACE_S, came_to=came_to)
    for text in silent.values():
        _log.warning("%s", text)
    standing = [p.address for p in processes if p.standing and p.address]
    for text in drop_tables(attempt.id.job_id, standing):
        _log.warning("%s", text)
    attempt.logs.add_processes(processes)
    attempt.logs.keep()
    # Whoever may still run may also save.
    if not (finished or silent or attempt.may_run_unseen):
        with suppress(Interrupted):
            _remove_unfinished(attempt)


def kept_promise(decision: Decision) -> float:
    """Measured over predicted throughput, of a run that was long enough to tell; else 0."""
    found = decision.measured
    if found.steady_steps < _STEADY_STEPS or found.emulated or not decision.throughput:
        return 0.0
    return found.steady_throughput / decision.throughput


def stop_others(attempt: Attempt, only: Sequence[Process] = ()) -> None:
    """Stop the processes that an attempt does not have, behind its back; safe to repeat.

    Those of nodes that are away, or do not answer, stay listed: they may come back.

    Args:
        only: these of them, as others may be starting.
    """
    context, others = attempt.context, list(only) or attempt.record.others
    there = [one for one in others if context.nodes.get(one.node.node_id) is not None]

    def stop() -> None:
        addresses = [process.node.address for process in there]
        silent = stop_job(attempt.id, addresses, context.channels, GRACE_S, there)
        for text in silent.values():
            _log.warning("%s", text)
        if attempt.state is State.RUNNING:
            stopped = [one for one in there if one.node.address not in silent]
            with suppress(Interrupted):
                attempt.record.drop_others(stopped)

    if there:
        threading.Thread(target=stop, name=f"stop {attempt.id.job_id}", daemon=True).start()


def _remove_unfinished(attempt: Attempt) -> None:
    """Have its nodes remove the half of a model that workers have left who were killed."""
    spec, nodes = attempt.spec(), {p.node.address for p in attempt.processes if not p.standing}
    if spec is None or not spec.output or not nodes:
        return
    output = output_of(attempt.id.job_id, spec, attempt.context.address)
    channels = attempt.context.channels
    for text in stop_job(attempt.id, [*nodes], channels, 0.0, unfinished=output).values():
        _log.warning("%s", text)


def _stop_everywhere(attempt: Attempt) -> None:
    """Stop the attempt on every node that is alive."""
    context, told = attempt.context, set[str]()
    until = time.monotonic() + _STOP_TRYING_S
    while time.monotonic() < until:
        left = {n.address for n in context.nodes.live(registry.NODE)} - told
        for address in sorted(left):
            if not stop_job(attempt.id, [address], context.channels, GRACE_S):
                told.add(address)
        if left <= told:
            return
        time.sleep(0.5)
