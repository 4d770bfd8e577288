"""A job from the queue to processes that train: profile, plan, reserve, start."""

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from importlib import import_module

from protos.decision_pb2 import Decision, Resources, Workload
from protos.job_pb2 import JobSpec
from protos.scheduler_pb2 import (
    END_INFEASIBLE_PLAN,
    END_INTERNAL,
    END_INVALID_JOB,
    END_LOST_NODE,
    END_NO_CAPACITY,
    JobStatus,
    NodeStatus,
)
from scheduler.methods.names import DEFAULT
from scheduler.problem.fields import InputError
from scheduler.problem.threads import node_units
from scheduler.problem.wording import sentence
from scheduler.runs.attempt import Attempt
from scheduler.runs.beginning import beginning_of
from scheduler.runs.calls import CallError, Interrupted, in_background
from scheduler.runs.changes.anew import bounds_of
from scheduler.runs.changes.deadline import hours_for_all, may_be_struck, unsure
from scheduler.runs.changes.guard import may_go_over
from scheduler.runs.constraints import may_depend_on_model, of_job, of_model, shared_cores
from scheduler.runs.failures import JobError
from scheduler.runs.launch import begin, groups_of, launch, place, shards_of
from scheduler.runs.offer import (
    AbsentError,
    Offer,
    OfferError,
    given_workload,
    look,
    make_offer,
    offered,
    profile,
    profiling_types,
    with_threads,
)
from scheduler.runs.options import Option, cheapest, compared, offers_of, open_type, routed
from scheduler.runs.plans import keep_begun
from scheduler.runs.recoveries import with_times
from scheduler.runs.states import State
from scheduler.state import nodes as registry
from scheduler.state.endings import Ending, first_line
from scheduler.state.packing import Group

_STAYS = (
    "Units that may be taken away are not used: the job has a deadline, and without two retries "
    "left, or with workers on GPUs or split experts, it could not leave such units in time."
)
_RETURN_S = 60.0  # for lost nodes to be there again before the next attempt is planned
_log = logging.getLogger("heterps.runner")


class Preparation:
    """Takes an attempt to where it trains; what comes of it lies in there.

    Args:
        may_reserve: whether no job of a higher priority waits for units.
    """

    def __init__(self, attempt: Attempt, may_reserve: Callable[[Attempt], bool]) -> None:
        self._attempt = attempt
        self._context = attempt.context
        self._stop = attempt.is_cancelled
        self._may_reserve = may_reserve
        self._told = ""  # what it waits for
        self._kept_at = 0.0  # of the oldest profile that it is planned by and that was kept
        self._planned_for: dict[str, str] = {}  # kind by id, of the nodes and shards alive then

    def run(self) -> None:
        """Do it all.

        Raises:
            JobError, CallError, OfferError, StoreError: the attempt ends.
            Interrupted: it was cancelled.
        """
        context, attempt = self._context, self._attempt
        spec = attempt.spec()
        if spec is None:
            text = "its specification is gone from Redis"
            raise JobError(Ending(END_INTERNAL, text, error=text))
        status = context.jobs.get(attempt.id.job_id)
        if status is not None:
            attempt.beginning = beginning_of(status, spec, context.address)
        attempt.enter(State.PROFILING)
        threading.Thread(target=_import_planner, name="planner", daemon=True).start()
        if attempt.beginning.step:
            _log.info("job %s: goes on from %s", attempt.id.job_id, attempt.beginning.place)
        # No other attempt may ever have this number: nodes know attempts by it.
        attempt.persist(lambda: context.jobs.write(attempt.id.job_id))
        if status is not None and status.attempts:
            self._await_nodes(spec, drained=status.attempts[-1].drained)
        offers, live = self._offers(spec)
        for offer in offers:
            if offer.note:
                _log.info("job %s: %s", attempt.id.job_id, offer.note)
        times = attempt.persist(context.store.recovery_times)
        timed = [with_times(offer.resources, times, spec) for offer in offers]
        said = timed[0][1]
        offers = [
            replace(offer, resources=resources)
            for offer, (resources, _) in zip(offers, timed, strict=True)
        ]
        self._keep_routes(spec)
        given = bool(spec.schedule.given.layers)
        if given:
            workloads = [given_workload(spec, offers[0])]
        else:
            offers = self._profilable(spec, offers)
            workloads = self._profiles(spec, offers)
        if self._kept_at:
            said = [*said, _kept_note(self._kept_at)]
        attempt.enter(State.PLANNING)
        options = []
        for offer, workload in zip(offers, workloads, strict=True):
            constrained = of_job(workload, routed(spec, offer), live)
            decision = self._plan(spec, constrained.workload, offer)
            options.append(Option(offer, constrained, decision))
        chosen = cheapest(options)
        offer, constrained, decision = chosen.offer, chosen.constrained, chosen.decision
        said = [*said, *compared(chosen, options)]
        if given and may_depend_on_model(decision, spec):
            home = next(node for node in live if node.type in decision.assignment)
            seen = look(attempt.id, spec, home, context.channels, self._stop)
            full = of_model(workloads[0], routed(spec, offer), live, seen)
            if full.workload != constrained.workload:
                decision = self._plan(spec, full.workload, offer)
            constrained = full
        attempt.decision = self._keep(decision, offer, [*constrained.notes, *said])
        units, standing = self._reserve(spec, decision)
        attempt.enter(State.STARTING)
        self._launch(spec, decision, units, standing)

    def _await_nodes(self, spec: JobSpec, *, drained: bool) -> None:
        """Wait for nodes of the attempt before, or for what another plan can do with.

        Args:
            drained: they went for good; else they may be starting again, and come back soon.
        """
        nodes = self._context.nodes
        store, job_id = self._context.store, self._attempt.id.job_id
        before = self._attempt.persist(lambda: store.decision(job_id))
        if before is None:
            return
        threads = {kind.name: kind.node_units or 1 for kind in before.resources.types}
        nodes.size(job_id, node_units(before.resources.types))
        shards, singles = shards_of(before, 0, nodes.live(registry.SHARD))
        counts = _counted([*groups_of(before), *shards], singles)
        until = time.monotonic() + _RETURN_S
        tried: list[Offer] = []
        known = {kind.name for kind in before.resources.types}

        def may_return() -> bool:
            return not drained and time.monotonic() < until

        def back() -> bool:
            alive = nodes.units(job_id)
            if all(alive.get(kind, 0) >= count for kind, count in counts.items()):
                return True
            if may_return():
                return False
            try:
                offer = make_offer(spec, nodes.placeable(), threads)
                if offer in tried:
                    return False
                tried.append(offer)
                if not drained and any(one.name not in known for one in offer.resources.types):
                    return True  # what it takes there is to be measured
                return self._plan(spec, offered(before.workload, offer), offer).feasible
            except OfferError:
                return False

        text = "waits for nodes in the place of those that drained"
        if not drained:
            text = "waits for nodes that have gone to come back"
        self._wait_for(lambda: back() or self._lacks(text, nodes_too=not may_return()))

    def _offers(self, spec: JobSpec) -> tuple[list[Offer], list[NodeStatus]]:
        """What the job can be planned on, and the live nodes; waits until there is something.

        Several where a type leaves open how many threads its workers have.
        """
        nodes = self._context.nodes
        found: list[tuple[list[Offer], list[NodeStatus]]] = []

        def ready() -> bool:
            live = nodes.placeable()
            try:
                found.append((offers_of(spec, live), live))
            except AbsentError as error:
                return self._lacks(f"waits: {error}")
            return True

        self._wait_for(ready)
        alive = [*found[0][1], *nodes.live(registry.SHARD)]
        self._planned_for = {status.node_id: status.kind for status in alive}
        return found[0]

    def _keep_routes(self, spec: JobSpec) -> None:
        """Have products run where they ran before, in this job or the one that it goes on from.

        Else an attempt would have other sums, and its weights other bits.
        """
        store = self._context.store
        for job_id in filter(None, (self._attempt.id.job_id, spec.train.resume.job_id)):
            before = self._attempt.persist(partial(store.decision, job_id))
            if before is not None and before.workload.linear:
                del spec.train.routes[:]
                spec.train.routes.extend(before.workload.linear)
                return

    def _profilable(self, spec: JobSpec, offers: list[Offer]) -> list[Offer]:
        """Those of offers of other threads for which as many cores are free on a node now.

        Others may hold the rest for days: a plan for fewer is not to wait for that.
        """
        nodes, owner = self._context.nodes, f"{self._attempt.id.job_id} (profiling)"
        found = []
        for offer in offers if len(offers) > 1 else ():
            nodes.size(owner, node_units(offer.resources.types))
            if nodes.available(owner).get(open_type(spec)):
                found.append(offer)
        nodes.size(owner, {})
        return found or offers[:1]

    def _profiles(self, spec: JobSpec, offers: Sequence[Offer]) -> list[Workload]:
        """The costs on each offer: on others than the first, what workers of other threads take."""
        first = self._profile(routed(spec, offers[0]), offers[0], profiling_types(offers[0]))
        found = [first]
        for offer in offers[1:]:
            kind = open_type(spec)
            types = [one for one in offer.resources.types if one.name == kind]
            alone = replace(offer, resources=Resources(types=types))
            measured = self._profile(routed(spec, offer), alone, [kind])
            found.append(with_threads(first, kind, measured))
        return found

    def _profile(self, spec: JobSpec, offer: Offer, kinds: list[str]) -> Workload:
        """Measure on one free unit of each of these types."""
        nodes, owner = self._context.nodes, f"{self._attempt.id.job_id} (profiling)"
        nodes.size(owner, node_units(offer.resources.types))
        try:
            homes = self._wait_for_units(owner, [], kinds)
            channels = self._context.channels
            found = profile(self._attempt.id, spec, offer, homes, channels, self._stop)
            if found.kept_at:
                self._kept_at = min(self._kept_at or found.kept_at, found.kept_at)
            return found.workload
        finally:
            nodes.release(owner)
            nodes.size(owner, {})

    def _plan(self, spec: JobSpec, workload: Workload, offer: Offer) -> Decision:
        # Brings NumPy and, for ppo, torch: only when it is needed.
        from scheduler.decision import record
        from scheduler.planning.elastic import plan_within
        from scheduler.planning.planner import plan
        from scheduler.problem import workload as problem

        schedule = spec.schedule
        status = self._context.jobs.get(self._attempt.id.job_id) or JobStatus()
        resources = problem.Resources.from_message(offer.resources)

        def best(
            some: problem.Resources, floor: float, without: Sequence[str], hours: float
        ) -> record.Decision:
            return plan(
                workload,
                some,
                floor or None,
                method=schedule.method or DEFAULT,
                seed=spec.train.seed % 2**32,
                pin=dict(schedule.pin) or None,
                # A type that no live node has is out of reach anyhow.
                exclude=[*(k for k in schedule.exclude if k not in offer.missing), *without],
                max_price_per_hour=schedule.max_price_per_hour or None,
                finish_by=hours or None,
            )

        def within(hours: float, left_out: Sequence[str] = ()) -> Decision:
            found = plan_within(
                bounds_of(spec),
                resources,
                schedule.min_throughput,
                lambda some, floor, without: best(some, floor, [*without, *left_out], hours),
            )
            return found.to_message()

        def decide() -> Decision:
            hours = hours_for_all(status, spec, workload.samples, time.time())
            found = within(hours)
            if hours and may_be_struck(found) and not may_go_over(status, spec, found):
                found = within(hours, unsure(offer.resources))
                found.reasons.append(_STAYS)
            if hours and self._attempt.id.number > 1:  # late is better than given up
                for longer in (schedule.finish_by_hours, 0.0):
                    found = found if found.feasible else within(longer)
            return found

        try:
            return in_background(decide, self._stop)
        except InputError as error:
            text = "; ".join(filter(None, (str(error), offer.note)))
            raise JobError(Ending(END_INVALID_JOB, text, error=str(error))) from None

    def _keep(self, decision: Decision, offer: Offer, notes: list[str]) -> Decision:
        """Keep a decision with what it had to obey.

        Raises:
            JobError: it has no plan.
        """
        if offer.unfit or offer.small:
            notes.append(sentence(f"Types {offer.note}"))
        notes += shared_cores(decision, self._context.nodes.live(registry.NODE))
        decision.reasons.extend(notes)
        self._attempt.keep(decision)
        if not decision.feasible:
            reason = f"no plan meets the job's demands: {decision.reason}"
            text = "; ".join(filter(None, (reason, offer.note)))
            raise JobError(Ending(END_INFEASIBLE_PLAN, text, error=first_line(reason)))
        return decision

    def _reserve(
        self, spec: JobSpec, decision: Decision
    ) -> tuple[list[NodeStatus], list[NodeStatus]]:
        """The units of the plan, and the standing shards where it uses those."""
        nodes, owner = self._context.nodes, self._attempt.id.job_id
        while True:
            standing = self._standing(spec)
            shards, singles = shards_of(decision, spec.servers.shards, standing)
            units = self._wait_for_units(owner, [*groups_of(decision), *shards], singles)
            if all(nodes.get(shard.node_id) for shard in standing):
                return units, standing
            nodes.release(owner)  # one went while others were waited for

    def _standing(self, spec: JobSpec) -> list[NodeStatus]:
        """The standing shards, waiting for those that were there when the job was planned."""
        found: list[NodeStatus] = []

        def ready() -> bool:
            found[:] = self._context.nodes.live(registry.SHARD)
            gone = self._gone(registry.SHARD)
            if gone and len(found) < max(1, spec.servers.shards):
                return self._lacks(f"waits for standing shards to come back: {', '.join(gone)}")
            return True

        self._wait_for(ready)
        return found

    def _wait_for_units(
        self, owner: str, groups: list[Group], singles: list[str]
    ) -> list[NodeStatus]:
        """Reserve units, waiting for other jobs to give some back."""
        nodes = self._context.nodes
        got: list[NodeStatus] = []

        def ready() -> bool:
            may = self._may_reserve(self._attempt)
            placed = nodes.reserve(owner, groups, singles) if may else None
            if placed is not None:
                got.extend(placed)
                return True
            counts, alive = _counted(groups, singles), nodes.units(owner)
            needs = ", ".join(f"{count} {kind}" for kind, count in counts.items())
            few = [kind for kind, count in counts.items() if alive.get(kind, 0) < count]
            if not few and nodes.could_reserve(groups, singles, owner):
                return self._lacks(f"waits for {needs} to become free", nodes_too=False)
            there = ", ".join(f"{alive.get(kind, 0)} {kind}" for kind in counts)
            together = [f"{group.units} {group.type}" for group in groups if group.one_host]
            text = f"the plan needs {needs}, and {there} are alive"
            if together and not few:
                text = f"the plan needs {' and '.join(together)} on one host, and none has so many"
            gone = self._gone(registry.NODE)
            if not gone:
                raise JobError(Ending(END_NO_CAPACITY, text, error=text))
            return self._lacks(f"{text}: waits for {', '.join(gone)} to come back, or for others")

        self._wait_for(ready)
        return got

    def _gone(self, kind: str) -> list[str]:
        """Nodes, or standing shards, that were alive when the job was planned and are not."""
        nodes = self._context.nodes
        live = nodes.placeable() if kind == registry.NODE else nodes.live(kind)
        alive = {status.node_id for status in live}
        return sorted(i for i, one in self._planned_for.items() if one == kind and i not in alive)

    def _lacks(self, text: str, *, nodes_too: bool = True) -> bool:
        """Tell what is waited for; False.

        Args:
            nodes_too: nodes are, and not only units that other jobs hold.
        """
        self._attempt.waits_for_nodes = nodes_too
        if text != self._told:
            self._told = text
            self._attempt.set_reason(text)
        return False

    def _wait_for(self, ready: Callable[[], bool]) -> None:
        """Wait for nodes to change until they are as needed."""
        self._attempt.waits_for_units = True
        try:
            if not self._context.nodes.wait_for(ready, self._stop):
                raise Interrupted
        finally:
            self._attempt.waits_for_units = self._attempt.waits_for_nodes = False
        if self._told:
            self._told = ""
            self._attempt.set_reason("")

    def _launch(
        self,
        spec: JobSpec,
        decision: Decision,
        units: list[NodeStatus],
        standing: list[NodeStatus],
    ) -> None:
        """Start all processes, and give the word to train."""
        context, attempt = self._context, self._attempt
        starting = time.monotonic()
        attempt.record.processes = place(attempt.id, spec, decision, units, standing, context.nodes)
        started = launch(
            attempt.id,
            spec,
            decision,
            attempt.processes,
            context.address,
            context.channels,
            self._stop,
            attempt.beginning.place,
            former=attempt.former(),
        )
        attempt.started_s = time.monotonic() - starting
        attempt.run(started, [node.node_id for node in units])
        follower = attempt.follower = attempt.new_follower()
        # Before the word is given: a scheduler that takes over must not start again what trains.
        attempt.enter(State.RUNNING)
        try:
            begin(attempt.id, attempt.processes, context.channels, self._stop)
        except CallError as error:
            told = Ending(END_LOST_NODE, str(error), error=first_line(str(error)))
            found = follower.diagnose(self._stop, told).ending
            raise JobError(found or told) from None
        keep_begun(attempt)


def _import_planner() -> None:
    """Import what `_plan` will, which takes longer than a kept profile to be found."""
    with suppress(Exception):  # it says so where it is needed
        import_module("scheduler.planning.elastic")
        import_module("scheduler.planning.planner")


def _kept_note(at: float) -> str:
    when = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(at))
    return (
        f"Costs are those of a profile of {when}: model, data, settings, software and machine are "
        "the same, and a core as fast."
    )


def _counted(groups: Sequence[Group], singles: Sequence[str]) -> Counter[str]:
    """Units by type."""
    counts = Counter(singles)
    for group in groups:
        counts[group.type] += group.units
    return counts
