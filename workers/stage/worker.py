"""One worker of one stage from its start to the saved model."""

import gc
import logging
import math
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from chassis import process
from chassis.channels import RpcError
from chassis.logs import log_fields
from chassis.memory import release_buffers
from protos.generations import keeps_cuts, keeps_state, may_be_replaced
from protos.naming import kept_with
from protos.node_pb2 import LaunchRequest
from protos.scheduler_pb2 import END_CONNECTION_LOST
from protos.stage_pb2 import LOADED, Notice, ReadStateRequest, Topology
from ps.errors import CheckpointError
from workers.data.reader import Split
from workers.errors import DivergedError, RowsLostError
from workers.links.all_reduce import Rendezvous
from workers.links.inbox import Inbox, Stopped
from workers.links.notices import Address
from workers.links.ring_port import RingPort
from workers.links.service import StageService
from workers.links.session import Session
from workers.model.code.entry import ModelError, job_model
from workers.model.objective.metrics import JobMetrics
from workers.model.saved.cut import CutError
from workers.model.saved.likeness import likeness
from workers.model.saved.model import KeptModel, SavedModel, saved_model
from workers.stage.connect import build
from workers.stage.cuts.beginning import Beginning
from workers.stage.cuts.folder import remove_cuts
from workers.stage.cuts.kept import to_chunks
from workers.stage.experts.outside import outside_of
from workers.stage.experts.split import state_bytes, whole_state
from workers.stage.parts import Parts
from workers.stage.regroups import Regroups, read_state
from workers.stage.report.failure import end_reason_of, told
from workers.stage.report.reporter import Reporter
from workers.stage.restoring import check_best, restore_best
from workers.stage.rows.ahead import create_tables
from workers.stage.rows.source import TrainingSource
from workers.stage.running.evaluation import Measured, splits_to_predict
from workers.stage.saved_check import check_saved
from workers.stage.share import Share
from workers.stage.steps.series import holds_just, series_of

_DECIDED_S = 30.0  # after others begin, for a step in doubt to be decided on
_LOOK_S = 0.005
_STAY_S = 0.05
_log = logging.getLogger("heterps.stage")


class Worker:
    """Loads its share, listens, waits for the others, is built, and runs the phases.

    Args:
        bind: host:port to listen on.
        stop: ends the work early.
        source: the file that `launch` was read from.
    """

    def __init__(
        self, launch: LaunchRequest, bind: str, stop: threading.Event, source: Path | None = None
    ) -> None:
        self._launch = launch
        self._source = source
        self._stop = stop
        self._share = Share.of(launch, anew=launch.generation > 0)
        self._host = bind.rpartition(":")[0]
        self._service = StageService(self._session(launch.generation))
        self._regroups = Regroups(self._service, stop)
        self._kept: Beginning | None = None
        self._doubtful: Parts | None = None  # that have all of the next step but the verdict
        self._judged: tuple[Notice, ...] = ()  # of the newest generation that this one trained in
        self._trained: int | None = None
        self._unfinished: SavedModel | KeptModel | None = None  # a model that is ours to complete
        self._line = 0  # the last generation that began at a cut, of what is kept
        self._told_at = self._stepped_at = time.monotonic()  # to go on; that a step had ended
        if may_be_replaced(launch.devices):
            self._service.on_regroup = self._regroups.ask
            self._service.kept = self._kept_after
        self._service.serve(bind)
        place = self._share.place
        hosts_store = place.width > 1 and place.rank == 0
        self._rendezvous = Rendezvous(self._host) if hosts_store else None

    def run(self, ready_file: Path | None) -> None:
        """Announce, wait for the topology, train, evaluate, save.

        Raises:
            Stopped: it was told to end.
        """
        process.announce(
            ready_file,
            address=self._service.address,
            rendezvous=self._rendezvous.address if self._rendezvous else "",
            contents=self._share.contents,
        )
        reporter = Reporter(
            self._launch,
            self._share.schedule.steps,
            self._stop,
            interval_s=0.5 if self._share.place.leads or self._judges else 2.0,
            source=self._source,
        )
        try:
            while not self._generation(reporter):
                gc.collect()  # the parts of the last one, which know each other: weights and all
                reporter.begin(self._service.session.generation)
                self._share = Share.of(self._launch, anew=True)
        except (Exception, SystemExit) as error:
            try:
                if not isinstance(error, Stopped) and not self._stop.is_set():
                    reason = end_reason_of(error, self._launch.job)
                    reporter.send("failed", error=told(error), end_reason=reason)
            finally:
                if self._unfinished is not None:
                    self._unfinished.abandon()  # once that is told: others who write it fail now
            raise
        finally:
            reporter.close()
            self._service.stop(0.5)

    def _generation(self, reporter: Reporter) -> bool:
        """Do a worker's part in one generation of them; False where another follows.

        Raises:
            Stopped: it was told to end.
        """
        session = self._service.session
        parts: Parts | None = None
        try:
            topology = self._wait_for_topology()
            self._told_at = time.monotonic()
            if session.generation:
                self._kept, self._line = self._kept_for(topology), topology.line
                self._share = self._share.begun(self._kept, topology.cut)
            parts = build(
                self._share,
                topology,
                session,
                self._rendezvous,
                (lambda: self._cuts(reporter)) if self._launch.cuts else None,
            )
            progress = parts.executor.progress
            reporter.follow(progress)
            self._service.on_pause = progress.pause_asked.set
            log_fields(step=lambda: progress.step)
            self._settle_tables(parts, topology)
            self._kept, self._trained = None, session.generation
            self._share = replace(self._share, beginning=replace(self._share.beginning, state=None))
            self._run(parts, reporter)
            return True
        except (Exception, SystemExit) as error:
            if not self._regroups.is_due(session) and not self._lost_touch(error):
                raise
            if self._stop.is_set():
                raise Stopped("stopped") from None
            self._give_up(session, parts, error, reporter)
        finally:
            session.inbox.close()
            if parts is not None:
                parts.close(experts=self._doubtful is not parts)
            self._share.batches.close()
        number = self._regroups.wait(session)
        if session.goes_back:
            if self._doubtful is not None:
                self._doubtful.close_experts()
            self._kept, self._doubtful, self._judged = None, None, ()
        self._regroups.begin(
            *(self._session(number), self._kept, self._judged, self._trained or 0, self._line),
            in_doubt=self._doubtful is not None,
            idle_s=time.monotonic() - max(self._told_at, self._stepped_at),
        )
        return False

    def _give_up(
        self, session: Session, parts: Parts | None, error: BaseException, reporter: Reporter
    ) -> None:
        """Keep what the next generation goes on from, and tell where nobody asked for that."""
        keeps = keeps_state(self._launch.job) and not session.goes_back
        if parts is not None and self._trained == session.generation and keeps:
            with suppress(Exception):  # what does not come to pass is done again
                parts.executor.catch_up()
            session.inbox.close()
            try:
                kept = self._keep(parts)
            except Exception:
                if not session.goes_back:  # else it waited for a shard that is lost
                    raise
            else:
                doubtful = parts.ending.in_doubt(kept.step) and not kept.to_validate
                self._doubtful = parts if doubtful else None
                _log.warning("gave up step %d: %s", kept.step, told(error))
        if not self._regroups.is_due(session):
            reporter.send("lost", error=told(error))

    def _keep(self, parts: Parts) -> Beginning:
        kept = replace(parts.keep(), contents=self._share.contents)
        progress = parts.executor.progress
        self._kept = kept
        if progress.stepped_s:
            self._stepped_at = time.monotonic() - progress.train_seconds + progress.stepped_s
        for notice in parts.ending.judged:
            notice.generation = self._trained or 0
        self._judged = tuple(parts.ending.judged)
        return kept

    @property
    def _judges(self) -> bool:
        return self._share.place.stage == self._share.place.rank == 0

    def _session(self, generation: int) -> Session:
        place = self._share.place
        port = RingPort(place.rank, place.width, self._host) if place.width > 1 else None
        return Session(Inbox(self._stop), port, generation)

    def _lost_touch(self, error: BaseException) -> bool:
        """Whether it is others who are gone, and they may be replaced."""
        devices = self._launch.devices
        if not may_be_replaced(devices) or isinstance(error, Stopped | RowsLostError):
            return False
        return end_reason_of(error, self._launch.job) == END_CONNECTION_LOST

    def _kept_after(self, step: int) -> Iterator[bytes] | None:
        until = time.monotonic() + _DECIDED_S
        while self._doubtful is not None and time.monotonic() < until:
            time.sleep(_LOOK_S)  # it is told about now how the step ended
        kept = self._kept
        return to_chunks(kept) if kept is not None and kept.step == step else None

    def _decide(self, topology: Topology) -> None:
        """Take the step in doubt if others took it."""
        doubtful, kept = self._doubtful, self._kept
        if doubtful is not None and kept is not None and topology.donors:
            known = {(notice.generation, notice.step): notice for notice in topology.judged}
            notice = known.get((self._trained or 0, kept.step))
            if notice is not None and (kept.step + 1, self._line) == (topology.step, topology.line):
                doubtful.executor.decide(notice)
                self._keep(doubtful)
        if doubtful is not None:
            doubtful.close_experts()
        self._doubtful = None

    def _kept_for(self, topology: Topology) -> Beginning | None:
        """What a generation goes on with; None: it begins at a cut, or at the first step."""
        self._decide(topology)
        if not topology.donors:
            return None
        kept = self._kept
        if kept is not None and (kept.step, self._line) == (topology.step, topology.line):
            return kept
        return read_state(
            topology.donors[self._share.place.stage],
            ReadStateRequest(generation=topology.generation, step=topology.step),
            lambda: self._service.session.inbox.stopped,
            self._share.folder,
        )

    def _run(self, parts: Parts, reporter: Reporter) -> None:
        """Train, evaluate and save; of a training that diverged, save what was good."""
        saved = self._saved(reporter)
        # A disk that is full for a while ends nothing that trains already.
        if self._share.place.rank == 0 and not self._service.session.generation:
            # Beside each other for a while: the stages' parts, and the whole.
            saved.require_room(2 * state_bytes(self._share.graph.module))
        diverged: DivergedError | None = None
        try:
            self._train(parts, reporter)
        except DivergedError as error:
            diverged = error
        saved = self._saved(reporter)  # the scheduler may have moved
        self._evaluate_and_save(parts, reporter, saved, diverged)

    def _saved(self, reporter: Reporter) -> SavedModel | KeptModel:
        output = kept_with(self._launch.output, reporter.scheduler)
        return saved_model(output, self._launch.attempt, self._service.session.generation)

    def _cuts(self, reporter: Reporter) -> str:
        """Where the job's cuts lie now."""
        return kept_with(self._launch.cuts, reporter.scheduler)

    def _evaluate_and_save(
        self,
        parts: Parts,
        reporter: Reporter,
        saved: SavedModel | KeptModel,
        diverged: DivergedError | None,
    ) -> None:
        """Write the stage's weights, predict what was held out, and complete the model."""
        leads = self._share.place.leads
        self._unfinished = saved
        if diverged is not None and parts.executor.following.validations.best is not None:
            self._trained = None  # what follows is the state of no step: nobody goes on from it
        best = restore_best(self._share, parts, self._cuts(reporter))
        with parts.update.averaged():
            self._write_weights(parts, saved)
            measured = self._evaluate(parts) if diverged is None else {}
        results = self._metrics(measured)
        if not leads:  # from here on it may be that the leader completes it
            self._unfinished = None
        parts.executor.drain()
        parts.leave()
        if not leads:
            reporter.send("trained")
            self._stay()
            return
        if parts.callbacks is not None:
            parts.callbacks.measured(results)
            parts.callbacks.end(told(diverged) if diverged is not None else "")
        release_buffers()  # of training: who saves has all layers' weights beside its own
        output = self._save(parts, saved, results, best)
        if diverged is None:
            release_buffers()
            check_saved(self._share, parts.client, output, measured)
            reporter.send("done", metrics=results, output=output)
            moved = self._service.session.generation or self._launch.resume
            if moved and not keeps_cuts(self._launch.job):
                with suppress(OSError, CheckpointError):
                    remove_cuts(self._cuts(reporter), self._launch.job_id)
        else:
            reason = end_reason_of(diverged)
            reporter.send("failed", error=told(diverged), end_reason=reason, output=output)

    def _stay(self) -> None:
        """Keep the state until the job is over: without the leader, another one has to save it.

        Raises:
            Stopped: another generation follows.
        """
        session = self._service.session
        while self._service.on_regroup is not None and not self._stop.wait(_STAY_S):
            if self._regroups.is_due(session):
                raise Stopped("another worker has to save the model")

    def _wait_for_topology(self) -> Topology:
        """The scheduler's word, which comes once the last of all workers listens.

        However long that takes: who does not start, and a node that goes away, end this worker too.
        """
        session = self._service.session
        while (topology := self._service.wait_for_topology(0.1)) is None:
            if session.inbox.stopped:
                raise Stopped("stopped")
        return topology

    def _train(self, parts: Parts, reporter: Reporter) -> None:
        share, job, executor = self._share, self._launch.job, parts.executor
        if self._judges:
            check_best(share, parts, self._cuts(reporter))
        source = None
        if share.place.stage == 0:
            source = TrainingSource(
                share.batches,
                executor.own,
                range(share.beginning.step, share.schedule.steps),
                share.staleness,
                parts.rows,
                executor.upload,
                self._service.session.inbox,
                executor.loss,
            )
        precision = job.train.precision or "fp32"
        _log.info("training %d steps in %s on %s", share.schedule.steps, precision, share.device)

        def on_pause() -> None:
            if self._judges:
                with suppress(RpcError):  # it is told again with each report
                    reporter.send(retry_s=0.0)

        executor.train(source, on_pause)
        share.batches.close()
        _log.info("trained in %.1f s", executor.progress.train_seconds)
        if (outside := outside_of(self._share.graph.module)) is not None:
            _log.info("%s", outside.line())

    def _settle_tables(self, parts: Parts, topology: Topology) -> None:
        """Wait until the tables hold what the training begins with.

        Raises:
            CutError: the cut's cannot be loaded.
            RowsLostError: they hold other steps than those that were kept.
        """
        share, place = self._share, self._share.place
        beginning, notices = share.beginning, parts.notices
        generation = topology.generation
        if not beginning.tables and not generation:
            return
        told: list[Address] = []
        held = False
        if topology.donors and place.rank == 0:
            last = topology.former[place.stage]
            names = [
                series_of(share.tables, self._launch.attempt, one, place.stage)
                for one in range(last, generation)
            ]
            judged = [notice for notice in topology.judged if notice.generation == last]
            if beginning.committed:  # and the tables may be those of the best since
                judged = []
            parts.ending.take_over(names, judged, beginning.step)
            told = [(place.stage, rank) for rank in range(place.width)]
        if not topology.donors and self._judges:
            if topology.HasField("paused"):
                held = holds_just(
                    *(parts.client, share.tables, self._launch.attempt, topology.paused),
                    *(len(share.layers), beginning.step),
                )
                _log.info("the tables hold %s the cut", "just" if held else "more than")
            if beginning.tables and not held:
                anew = not beginning.step  # what `train.from` names has weights, and no more
                if anew:  # those of other stages may not be there yet
                    create_tables(parts.client, share.all_tables, share.tables, self._launch.job)
                try:
                    rows = parts.client.load(
                        beginning.tables, rename=beginning.rename, weights_alone=anew
                    )
                except CheckpointError as error:
                    kind = CutError if beginning.step else ModelError
                    raise kind(f"{beginning.tables}: {error}") from error
                _log.info("%d rows loaded from %s", rows, beginning.tables)
            told = [(s, rank) for s, width in enumerate(place.widths) for rank in range(width)]
        for worker in told:
            notices.tell(worker, LOADED, beginning.step)
        inbox = self._service.session.inbox
        inbox.wait(lambda: notices.board.has(LOADED, beginning.step))

    def _write_weights(self, parts: Parts, saved: SavedModel | KeptModel) -> None:
        """Write the stage's weights: before the next phase ends, so that the last stage has them.

        All workers of the stage call it: each has its own experts.
        """
        state = {**whole_state(self._share.graph.module, parts.group), **self._share.graph.uncalled}
        if self._share.place.rank == 0:
            if (outside := outside_of(self._share.graph.module)) is not None:
                state |= outside.weights()
            saved.write_stage(self._share.place.stage, state)

    def _evaluate(self, parts: Parts) -> dict[Split, Measured]:
        """Predict the held-out splits, or some of the training data."""
        splits = splits_to_predict(self._launch.job)
        return {split: parts.executor.evaluate(split) for split in splits}

    def _metrics(self, measured: Mapping[Split, Measured]) -> dict[str, float]:
        """The metrics of the held-out splits, where this worker leads; else none."""
        results: dict[str, float] = {}
        if self._share.place.leads:
            metrics = JobMetrics(self._launch.job)
            for split, one in measured.items():
                if split != "train":  # which is only looked at
                    results |= metrics.measure(one.found, split)
        return results

    def _save(
        self,
        parts: Parts,
        saved: SavedModel | KeptModel,
        results: dict[str, float],
        best: int,
    ) -> str:
        """Save the tables and complete the model, which is that of step `best`; where it is."""
        progress = parts.executor.progress
        progress.phase = "save"
        parts.client.save(saved.tables, prefix=self._share.tables)
        facts = {
            "job_id": self._launch.job_id,
            "layers": [layer.name for layer in self._share.layers],
            "metrics": {k: v if math.isfinite(v) else None for k, v in results.items()},
            "steps": progress.step,
            "samples": progress.samples,
            "train_seconds": progress.before_s + progress.train_seconds,
        }
        if not self._launch.job.train.offload.memory:
            facts["likeness"] = likeness(
                job_model(self._launch.job, weights_follow=True), self._launch.job
            )
        if done := parts.executor.following.validations.done:
            facts["best_step"] = best
            facts["validated"] = [{"step": one.step, "metrics": one.metrics} for one in done]
        stages = len(self._share.place.widths)
        return saved.finish(self._launch.job, stages, progress.curve, facts)
