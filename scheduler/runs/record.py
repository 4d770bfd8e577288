"""What the scheduler keeps of a run, so that another one can follow it."""

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from protos.decision_pb2 import Decision
from protos.node_pb2 import SHARD
from protos.scheduler_pb2 import Move, RunRecord
from scheduler.runs.processes import Process
from scheduler.runs.sharing import units_of


class Record:
    """The processes of a run and the generations of its workers; each change is one write.

    Safe to use from many threads: another plan's workers are started by one of their own.

    Args:
        write: keeps it, waiting for a store that is away.
        restore: has these node ids be of the units that the job holds.

    Attributes:
        processes: of the job, once they are placed.
        lock: held by whoever changes it.
    """

    def __init__(
        self, write: Callable[[RunRecord], None], restore: Callable[[Sequence[str]], None]
    ) -> None:
        self._write = write
        self._restore = restore
        self._message = RunRecord()
        self.processes: list[Process] = []
        self.lock = threading.RLock()

    def take_up(self, message: RunRecord) -> None:
        """What another scheduler has kept."""
        self._message.CopyFrom(message)
        self.processes = [Process.of(placed) for placed in message.processes]
        self._note_shards()

    def begin(self, message: RunRecord, processes: Sequence[Process]) -> None:
        """Keep a run whose processes listen; `message` has the units that it holds."""
        with self.lock:
            self._message, self.processes = message, list(processes)
            self._note_shards()
            self._keep()

    @property
    def generation(self) -> int:
        """Of the workers."""
        return self._message.generation

    @property
    def line(self) -> int:
        """The last generation that began at a cut: states of those before count no more."""
        return self._message.line

    @property
    def resumed(self) -> bool:
        """Whether the workers were launched to begin at a cut."""
        return self._message.resumed

    @property
    def is_regrouping(self) -> bool:
        """Whether not all workers of this generation were told to go on."""
        return self._message.regrouping

    @property
    def samples(self) -> int:
        """Trained before this generation."""
        return self._message.samples

    @property
    def others(self) -> list[Process]:
        """Workers that are to be stopped, unless the job goes over to them."""
        return [Process.of(placed) for placed in self._message.others]

    @property
    def of_shards(self) -> list[str]:
        """Node ids, one for each unit that is held for shards."""
        return list(self._message.of_shards)

    @property
    def of_workers(self) -> list[str]:
        """Node ids, one for each unit that workers have."""
        return units_of(self.processes)

    @property
    def change(self) -> Move | None:
        """What is to be told of a change that is under way; None: none is."""
        if not self._message.HasField("change"):
            return None
        found = Move()
        found.CopyFrom(self._message.change)
        return found

    def note_change(self, move: Move | None) -> None:
        """Keep what is to be told of a change by whoever takes over; None: it is told.

        What could not be kept is not told of: whoever asked for it hears so.
        """
        with self.lock:
            before = self.change
            self._set_change(move)
            try:
                self._keep()
            except BaseException:
                self._set_change(before)
                raise

    def units_of_shards(self, node_id: str) -> int:
        """How many units of a node are held for shards."""
        return self.of_shards.count(node_id)

    def next_generation(self, launched: int = 0) -> int:
        """The number of another generation of workers, which nobody else will have.

        Args:
            launched: that its workers were started for; it stays, where none came since.
        """
        with self.lock:
            kept = self._message
            later = max(kept.generation, kept.launched) + 1
            kept.generation = launched if launched > kept.generation else later
            kept.launched = max(kept.launched, kept.generation)
            kept.regrouping = True
            self._keep()
            return kept.generation

    def launched_generation(self) -> int:
        """A number for workers that are started before there is a generation of theirs."""
        with self.lock:
            self._message.launched = max(self._message.generation, self._message.launched) + 1
            self._keep()
            return self._message.launched

    def begin_line(self) -> None:
        """Note that the generation begins at a cut, before anybody is told so."""
        with self.lock:
            self._message.line = self._message.generation
            self._keep()

    def hold(self, more: Iterable[str] = ()) -> None:
        """Hold the units of the shards and workers, and no others.

        Args:
            more: node ids of units that are held besides.
        """
        with self.lock:
            units = [*self._message.of_shards, *self.of_workers, *more]
            del self._message.units[:]
            self._message.units.extend(units)
            self._restore(units)
            self._keep()

    def place(self, processes: Sequence[Process], for_shards: Sequence[str] = ()) -> None:
        """Note the processes of a generation, before its workers are told to go on.

        Those before that are none of them are to be stopped, dead or alive. Where a shard is one of
        these, rows are lost, so that what was trained of them counts no more.

        Args:
            for_shards: node ids, one for each unit that was reserved for shards that begin
                elsewhere.
        """
        with self.lock:
            left = self._replace(processes)
            if shards := [process for process in left if process.role == SHARD]:
                self._message.line = self._message.generation
                self._move_units(shards, for_shards)
            self.hold()

    def add_others(self, processes: Sequence[Process]) -> None:
        """Note workers that are started, and are none of the job's yet."""
        with self.lock:
            self._message.others.extend(process.to_message() for process in processes)
            self._keep()

    def drop_others(self, processes: Sequence[Process]) -> None:
        """These are stopped."""
        with self.lock:
            self._leave_out(processes)
            self._keep()

    def go_over(
        self,
        decision: Decision,
        processes: Sequence[Process],
        move: Move,
        for_shards: Sequence[str] | None = None,
    ) -> None:
        """Be of another plan, with its workers, from a cut on: in one write.

        Whoever takes over before it finds the plan before with its workers, afterwards this one.

        Args:
            move: what is to be told of it.
            for_shards: node ids, one for each unit of shards that are all others than before; None:
                these stay.
        """
        with self.lock:
            self._message.decision.CopyFrom(decision)
            self._message.change.CopyFrom(move)
            self._message.line = self._message.generation
            self._replace(processes)
            if for_shards is not None:
                del self._message.of_shards[:]
                self._message.of_shards.extend(for_shards)
            self.hold()

    def go_on(self, samples: int) -> None:
        """All workers of the generation were told to go on; the decision is kept by now."""
        with self.lock:
            self._message.regrouping, self._message.samples = False, samples
            self._message.ClearField("decision")
            self._keep()

    def _replace(self, processes: Sequence[Process]) -> list[Process]:
        """Be of these; those that are left, which are to be stopped."""
        left = [process for process in self.processes if process not in processes]
        self._leave_out(processes)
        self._message.others.extend(process.to_message() for process in left)
        self.processes = list(processes)
        return left

    def _set_change(self, move: Move | None) -> None:
        self._message.ClearField("change")
        if move is not None:
            self._message.change.CopyFrom(move)

    def _note_shards(self) -> None:
        if not self._message.of_shards:
            others = Counter(self._message.units) - Counter(self.of_workers)
            self._message.of_shards.extend(others.elements())

    def _move_units(self, left: Sequence[Process], reserved: Sequence[str]) -> None:
        """Have the units of nodes that shards have left be others."""
        used = {one.node.node_id for one in self.processes if one.role == SHARD}
        free = {one.node.node_id for one in left} - used
        kept = [node_id for node_id in self._message.of_shards if node_id not in free]
        del self._message.of_shards[:]
        self._message.of_shards.extend([*kept, *reserved])

    def _leave_out(self, processes: Sequence[Process]) -> None:
        names = {process.process_id for process in processes}
        left = [placed for placed in self._message.others if placed.process_id not in names]
        del self._message.others[:]
        self._message.others.extend(left)

    def _keep(self) -> None:
        del self._message.processes[:]
        self._message.processes.extend(process.to_message() for process in self.processes)
        self._write(self._message)
