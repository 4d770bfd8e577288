"""Where the cuts of a job lie: the newest stay, and the best, with all that they need."""

from collections.abc import Callable, Collection
from pathlib import Path

from chassis import written
from chassis.aim import Aim
from protos.job_pb2 import CheckpointSpec, JobSpec
from ps.checkpoint.bounds import read_at_most
from ps.checkpoint.places import open_store
from ps.checkpoint.store import LocalStore, Store
from ps.errors import CheckpointError
from workers.model.code.brought import copy_code
from workers.model.saved.cut import MANIFEST, Cut, CutError, DenseFiles, read_cut
from workers.stage.cuts.validation import Validations

_ATTEMPT = "attempt"
_MOST_ATTEMPT = 1 << 10  # bytes
_KEEP = 3


class SupersededError(RuntimeError):
    """A later attempt at the job, or generation of its workers, takes cuts."""


class CutFolder:
    """The cuts of one job, written by one generation of an attempt's workers at a time.

    Args:
        place: where they lie now; a folder or URL.
        writer: attempt and generation.
        from_step: that these began with; cuts after it are of those before, and given up.
    """

    def __init__(
        self,
        place: Callable[[], str],
        job_id: str,
        job: JobSpec,
        writer: tuple[int, int],
        from_step: int,
    ) -> None:
        self._place = place
        self._job_id = job_id
        self._job = job
        self._writer = writer
        self._from_step = from_step
        self._kept: list[Cut] = []
        self._others: list[Cut] = []  # of jobs that had the same output
        self._leaving: list[Cut] = []  # not kept any more, and not known to be given up elsewhere
        self._opened = False

    @property
    def place(self) -> str:
        """Where they lie now."""
        return self._place()

    @property
    def cuts(self) -> list[Cut]:
        """Those that are kept, the oldest first."""
        return list(self._kept)

    def open(self) -> None:
        """Say that this generation writes here from now on, and look at what is there.

        Raises:
            SupersededError: a later one does.
            OSError, CheckpointError: it cannot be written to.
        """
        if self._opened:
            return
        store = open_store(self.place)
        self._check(store)
        if isinstance(store, LocalStore):
            written.claim(Path(store.url))
            copy_code(self._job, Path(store.url) / "code")
        attempt, generation = self._writer
        store.replace(_ATTEMPT, f"{self._job_id} {attempt}.{generation}\n".encode())
        for step in _steps(store):
            try:
                cut = read_cut(f"{store.url}/{step}")
            except CutError:
                continue
            if cut.job_id != self._job_id:
                self._others.append(cut)
            elif cut.step <= self._from_step:
                self._kept.append(cut)
        self._opened = True

    def add(self, cut: Cut, named: Collection[int] | None) -> None:
        """Complete a cut, whose files are there, and remove what is needed no more.

        Args:
            named: steps of the cuts that a later attempt may be told to go on from; None where that
                is not known, so that all have to stay.

        Raises:
            SupersededError: a later attempt or generation writes here.
            OSError, CheckpointError: it cannot be written.
        """
        store = open_store(self.place)
        self._check(store)
        open_store(f"{store.url}/{cut.step}").replace(MANIFEST, cut.written())
        self._others = [other for other in self._others if other.step != cut.step]
        before = [c for c in self._kept if c.step != cut.step]
        best = Validations(self._job.train.validate, cut.validated).best
        steps = () if best is None else (best.step,)
        self._kept = to_keep([*before, cut], self._job.train.checkpoint, steps)
        self._leaving = [
            other
            for other in (*self._leaving, *before)
            if other not in self._kept and (named is None or other.step in named)
        ]
        self._remove_the_rest(store)

    def tidy(self) -> None:
        """Remove what a cut that failed has left, once nobody writes it any more.

        Raises:
            SupersededError: a later attempt or generation writes here.
            OSError, CheckpointError: it cannot be removed.
        """
        if not self._opened:  # it is not known what stays
            return
        store = open_store(self.place)
        self._check(store)
        self._remove_the_rest(store)

    def _remove_the_rest(self, store: Store) -> None:
        cuts = [*self._kept, *self._leaving, *self._others]
        steps = {cut.step for cut in cuts}
        for step in _steps(store):
            if step not in steps:
                store.remove(str(step))
        DenseFiles(store.url).keep({name for cut in cuts for name in cut.files()})
        tables = open_store(f"{store.url}/tables")
        needed = {folder for cut in cuts for folder in cut.tables.folders}
        for folder in tables.entries():
            if folder not in needed:
                tables.remove(folder)

    def _check(self, store: Store) -> None:
        try:
            job_id, told = _writer(store)
        except CheckpointError:
            return  # whatever it is, it is not ours
        attempt, _, generation = told.partition(".")
        if job_id != self._job_id or not attempt.isdecimal():
            return
        writer = int(attempt), int(generation) if generation.isdecimal() else 0
        if writer > self._writer:
            raise SupersededError(f"{store.url}: attempt {told} at the job takes cuts here")


def remove_cuts(place: str, job_id: str) -> None:
    """Remove the cuts of a job that has its model and takes none, but those that it moved by.

    Raises:
        OSError, CheckpointError: they cannot be removed.
    """
    if _writer(open_store(place))[0] == job_id:
        above, _, name = place.rpartition("/")
        open_store(above).remove(name)


def _writer(store: Store) -> tuple[str, str]:
    """The job whose cuts lie there, and `ATTEMPT.GENERATION` of the last that wrote any.

    Empty where nobody did.

    Raises:
        OSError, CheckpointError: it cannot be read.
    """
    try:
        with store.open(_ATTEMPT) as stream:
            text = read_at_most(stream, _MOST_ATTEMPT, _ATTEMPT).decode(errors="replace")
    except FileNotFoundError:
        return "", ""
    job_id, _, told = text.strip().rpartition(" ")
    return job_id, told


def _steps(store: Store) -> list[int]:
    return sorted(int(name) for name in store.entries() if name.isdecimal() and name.isascii())


def to_keep(cuts: list[Cut], spec: CheckpointSpec, steps: Collection[int] = ()) -> list[Cut]:
    """The newest, the best, and those of some steps, in the order of steps."""
    ordered = sorted(cuts, key=lambda cut: cut.step)
    aim = Aim.of(spec.best)
    scores = {cut.step: aim.score(cut.metrics) for cut in ordered}
    measured = [(score, step) for step, score in scores.items() if score is not None]
    stay = {*steps, *(cut.step for cut in ordered[-(spec.keep or _KEEP) :])}
    if measured:
        stay.add(max(measured)[1])
    return [cut for cut in ordered if cut.step in stay]
