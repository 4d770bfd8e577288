"""Where all workers of a new generation go on from, by what those before have kept."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from protos.job_pb2 import JobSpec
from protos.node_pb2 import STAGE
from protos.stage_pb2 import Notice, RegroupReply
from scheduler.runs.attempt import Attempt
from scheduler.runs.beginning import beginning_of
from scheduler.runs.failures import JobError
from scheduler.runs.launch import drop_tables
from scheduler.runs.processes import Process
from scheduler.state.endings import Ending


@dataclass(frozen=True, slots=True)
class GoOn:
    """Where the workers go on from.

    Attributes:
        step: updates in the state.
        samples: trained until then.
        donors: by stage, the process that has it; empty: all go back.
        judged: verdicts on the last steps before.
        former: by stage, the newest generation that any of its workers trained in.
        cut: folder or URL of the one that all go back to; empty: the first step.
        since: as of `Kept`, of those who have that step; 0: all go back.
    """

    step: int
    samples: int
    donors: tuple[Process, ...] = ()
    judged: tuple[Notice, ...] = ()
    former: tuple[int, ...] = ()
    cut: str = ""
    since: float = 0.0


@dataclass(frozen=True, slots=True)
class Kept:
    """What a worker of the generation before has kept.

    Attributes:
        since: when its step had ended, or it was told to go on from there; by time.monotonic().
    """

    reply: RegroupReply
    since: float


def go_back(attempt: Attempt, spec: JobSpec, cause: Ending) -> GoOn:
    """Where all begin anew: at the newest cut, else at the first step, without tables.

    Raises:
        JobError: nobody of this attempt can begin there.
    """
    context = attempt.context
    status = context.jobs.get(attempt.id.job_id)
    if status is None:
        raise JobError(cause)
    beginning = beginning_of(status, spec, context.address)
    attempt.record.begin_line()
    if not beginning.place:
        # Those that were launched to begin at a cut have not read what the job itself begins with.
        shards = [address for _, address in attempt.shards()]
        if attempt.record.resumed or drop_tables(attempt.id.job_id, shards, attempt.id.token):
            raise JobError(cause)
    return GoOn(beginning.step, beginning.samples, cut=beginning.place)


def go_on(
    processes: Sequence[Process], states: Mapping[str, Kept], stages: int, line: int
) -> GoOn | None:
    """Where all can go on; None where nobody of a stage has the state.

    Args:
        processes: of the new generation.
        states: by process, of those of the one before; some may not have begun.
        line: that a state must be of.
    """
    workers = {p.process_id: p for p in processes if p.role == STAGE}
    former = [0] * stages
    kept: dict[str, RegroupReply] = {}
    for name, one in states.items():
        stage, reply = workers[name].index, one.reply
        former[stage] = max(former[stage], reply.trained)
        if reply.has_state and reply.line == line:
            kept[name] = reply
    step = max((state.step for state in kept.values()), default=0)
    judged: dict[tuple[int, int], Notice] = {}
    for state in kept.values():
        judged |= {(n.generation, n.step): n for n in state.judged if n.step < step}
    decided = [
        workers[name]
        for name, state in kept.items()
        if state.in_doubt and state.step + 1 == step and (state.trained, state.step) in judged
    ]
    having = [name for name, state in kept.items() if state.step == step]
    donors = {worker.index: worker for worker in (*decided, *(workers[name] for name in having))}
    if len(donors) < stages:
        return None
    return GoOn(
        step,
        kept[having[0]].samples,
        tuple(donor for _, donor in sorted(donors.items())),
        tuple(notice for _, notice in sorted(judged.items())),
        tuple(former),
        since=max(states[name].since for name in having),
    )
