"""A second simulation of steps, in whole ticks, that shares nothing with the planner's."""

from collections.abc import Sequence

Stages = list[tuple[int, int, int, int, int]]  # units, and whole seconds
_SECOND = 1 << 40  # ticks


def ticks(
    stages: Stages,
    micro_batches: int,
    staleness: int,
    steps: int,
    way: int = 0,
    whole_batch: bool = False,
    delays: Sequence[int] = (),
) -> list[float]:
    """When each update is made, in seconds; links take turns, and crossing takes a tick at least.

    What has passed a link is on its way for half of `way` more. Of a loss of whole batches nothing
    is returned, nor begun of the next step in the last stage, before all forwards of a step are
    done there; whoever is not in the last stage may hold any number. A stage's part of an update is
    late by its delay, during which the next sum may pass.

    So what ends at one moment at both ends of a link ends there before anything has crossed.
    """
    stages = [(units, *(time * _SECOND for time in times)) for units, *times in stages]
    depth, total = len(stages), micro_batches * steps
    arrived = [dict.fromkeys(range(total), 0), *({} for _ in stages[1:])]
    returned: list[dict[int, int]] = [{} for _ in stages]
    held = [[0] * stage[0] for stage in stages]
    next_ = [list(range(stage[0])) for stage in stages]
    oldest = [list(range(stage[0])) for stage in stages]
    # What a worker, and its link, is doing: end, kind, micro-batch.
    work: dict[tuple[int, int], tuple[int, str, int]] = {}
    link: dict[tuple[int, int], tuple[int, str, int]] = {}
    queue: dict[tuple[int, int], list[tuple[int, int, str]]] = {}
    flying: list[tuple[int, str, int, int]] = []  # arrival, kind, stage, micro-batch
    left = [[micro_batches] * steps for _ in stages]
    summed = [0] * depth
    sums: list[tuple[int, int]] = []
    open_, updates, updated = [depth] * steps, 0, [0] * steps
    half = [cross // 2 + 1 for _, _, _, cross, _ in stages]
    most = [2 * -(-sum(units for units, *_ in stages[s:]) // stages[s][0]) for s in range(depth)]
    if whole_batch:
        most = [total] * depth
    ended: set[int] = set()  # forwards of the last stage
    now = 0
    while updates < steps:
        moved = True
        while moved:
            moved = False
            for at in [at for at in work if work[at][0] == now]:
                s, w = at
                _, kind, m = work.pop(at)
                moved = True
                if kind == "forward":
                    if s == depth - 1 and whole_batch:
                        ended.add(m)
                        step = m // micro_batches
                        batch = range(step * micro_batches, (step + 1) * micro_batches)
                        if ended >= set(batch):
                            returned[s] |= dict.fromkeys(batch, now)
                    elif s == depth - 1:
                        returned[s][m] = now
                    else:
                        queue.setdefault(at, []).append((now, m, "there"))
                else:
                    held[s][w] -= 1
                    if s:
                        below = (s - 1, m % stages[s - 1][0])
                        queue.setdefault(below, []).append((now, m, "back"))
                    left[s][m // micro_batches] -= 1
                    if not left[s][m // micro_batches]:
                        summed[s] = max(now, summed[s]) + stages[s][4]
                        later = delays[s] * _SECOND if delays else 0
                        sums.append((summed[s] + later, m // micro_batches))
            for at in [at for at in link if link[at][0] == now]:
                _, kind, m = link.pop(at)
                moved = True
                flying.append((now + way * _SECOND // 2, kind, at[0], m))
            for one in [one for one in flying if one[0] == now]:
                flying.remove(one)
                _, kind, s, m = one
                moved = True
                if kind == "there":
                    arrived[s + 1][m] = now
                else:
                    returned[s][m] = now
            for end, step in [one for one in sums if one[0] == now]:
                sums.remove((end, step))
                moved = True
                open_[step] -= 1
                if not open_[step]:
                    updated[step], updates = now, step + 1
            for at, waiting in queue.items():
                if waiting and at not in link:
                    # First come, first served; of those at once the earlier micro-batch.
                    waiting.sort()
                    _, m, kind = waiting.pop(0)
                    link[at] = (now + half[at[0]], kind, m)
                    moved = True
            if moved:
                continue
            for s, (units, forward, backward, _, _) in enumerate(stages):
                for w in range(units):
                    if (s, w) in work:
                        continue
                    back = [m for m in returned[s] if m == oldest[s][w]]
                    m = next_[s][w]
                    forth = (
                        m in arrived[s]
                        and held[s][w] < most[s]
                        and m // micro_batches - staleness <= updates
                        and not (
                            whole_batch
                            and s == depth - 1
                            and len(ended) < m // micro_batches * micro_batches
                        )
                    )
                    enough = whole_batch or held[s][w] * units >= sum(k for k, *_ in stages[s:])
                    if back and (enough or not forth):
                        m = back[0]
                        oldest[s][w] += units
                        del returned[s][m]
                        work[s, w] = (now + backward, "backward", m)
                    elif forth:
                        next_[s][w] += units
                        held[s][w] += 1
                        work[s, w] = (now + forward, "forward", m)
        ends = [*work.values(), *link.values(), *flying, *sums]
        assert ends or updates == steps, "nothing moves"
        now = min((end for end, *_ in ends), default=now)
    return [at / _SECOND for at in updated]
