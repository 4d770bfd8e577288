"""The series that the workers of a job commit rows in: their names, and their ends.

Each stage of each generation has one. What is late of one that has ended is never applied.
"""

from collections.abc import Sequence
from concurrent.futures import wait

from protos.reason_pb2 import STEP_OVER
from ps import ParameterClient, ShardError
from ps.table.series import LAST_STEP


def series_of(tables: str, attempt: int, generation: int, stage: int) -> str:
    """The name of the commits of a stage by one generation of an attempt's workers."""
    return f"{tables}{attempt}.{generation}.{stage}"


def holds_just(
    client: ParameterClient, tables: str, attempt: int, paused: int, stages: int, step: int
) -> bool:
    """Whether the tables hold just the steps before one at which a generation paused.

    Those before it have ended; so has this one afterwards.
    """
    names = [series_of(tables, attempt, paused, stage) for stage in range(stages)]
    try:
        asked = [client.discard_async(name, step, none_after=True) for name in names]
        wait(asked)  # for all: what follows one that fails, fails with it
        for one in asked:
            one.result()
    except ShardError as error:
        if error.reason != STEP_OVER:
            raise
        return False
    finally:
        for one in [client.discard_async(name, LAST_STEP) for name in names]:
            one.result()
    return True


def close_series(
    client: ParameterClient,
    tables: str,
    attempt: int,
    former: Sequence[int],
    over: int,
    stages: int,
) -> None:
    """Have the shards take no commit any more of what went before.

    Args:
        former: the last generation of each attempt before this one; 0 unless given.
        over: how many generations of this attempt.
        stages: that any of them may have had.
    """
    counts = {
        earlier: (former[earlier - 1] if earlier <= len(former) else 0) + 1
        for earlier in range(1, attempt)
    }
    closing = [
        client.discard_async(series_of(tables, earlier, generation, stage), LAST_STEP)
        for earlier, count in [*counts.items(), (attempt, over)]
        for generation in range(count)
        for stage in range(stages)
    ]
    for one in closing:
        one.result()
