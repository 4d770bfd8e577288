"""One worker of one stage from its start to the saved model."""

import logging
import math
import threading
from collections.abc import Mapping
from pathlib import Path

from chassis import process
from chassis.logs import log_fields
from protos.naming import kept_with
from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import LOADED, Topology
from ps.errors import CheckpointError
from workers.data.reader import Split
from workers.errors import DivergedError
from workers.learning import quality as metrics
from workers.links.all_reduce import Rendezvous
from workers.links.inbox import Inbox, Stopped
from workers.links.ring_port import RingPort
from workers.links.transport import StageService
from workers.model.cut import CutError
from workers.model.entry import ModelError
from workers.model.saved import KeptModel, SavedModel, saved_model
from workers.stage.evaluation import Measured
from workers.stage.experts import whole_state
from workers.stage.failure import end_reason_of, told
from workers.stage.parts import Parts, Share, build
from workers.stage.reporter import Reporter
from workers.stage.saved_check import check_saved
from workers.stage.source import TrainingSource

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
        self._share = Share.of(launch)
        place = self._share.place
        self._inbox = Inbox(stop)
        host = bind.rpartition(":")[0]
        self._port = RingPort(place.rank, place.width, host) if place.width > 1 else None
        self._service = StageService(self._inbox, self._port)
        self._service.serve(bind)
        hosts_store = place.width > 1 and place.rank == 0
        self._rendezvous = Rendezvous(host) if hosts_store else None

    def run(self, ready_file: Path | None) -> None:
        """Announce, wait for the topology, train, evaluate, save.

        Raises:
            Stopped: it was told to end.
        """
        process.announce(
            ready_file,
            address=self._service.address,
            rendezvous=self._rendezvous.address if self._rendezvous else "",
        )
        topology = self._wait_for_topology()
        reporter = Reporter(
            self._launch,
            self._share.schedule.steps,
            self._stop,
            interval_s=0.5 if self._share.place.leads else 2.0,
            source=self._source,
        )
        parts: Parts | None = None
        try:
            parts = build(
                self._share,
                topology,
                self._inbox,
                self._service.board,
                self._port,
                self._rendezvous,
                self._stop,
                (lambda: kept_with(self._launch.cuts, reporter.scheduler))
                if self._launch.cuts
                else None,
            )
            progress = parts.executor.progress
            reporter.follow(progress)
            log_fields(step=lambda: progress.step)
            self._run(parts, reporter)
        except Stopped:
            raise
        except (Exception, SystemExit) as error:
            if not self._stop.is_set():
                reason = end_reason_of(error, self._launch.job)
                reporter.send("failed", error=told(error), end_reason=reason)
            raise
        finally:
            reporter.close()
            self._inbox.close()
            if parts is not None:
                parts.close()
            self._service.stop(0.5)

    def _run(self, parts: Parts, reporter: Reporter) -> None:
        """Train, evaluate and save; of a training that diverged, save what was good."""
        saved = self._saved(reporter)
        if self._share.place.rank == 0:
            weights = self._share.graph.module.state_dict().values()
            # Beside each other for a while: the stages' parts, and the whole.
            saved.require_room(2 * sum(weight.nbytes for weight in weights))
        diverged: DivergedError | None = None
        try:
            self._train(parts)
        except DivergedError as error:
            diverged = error
        saved = self._saved(reporter)  # the scheduler may have moved
        try:
            self._evaluate_and_save(parts, reporter, saved, diverged)
        except BaseException:
            saved.abandon()
            raise

    def _saved(self, reporter: Reporter) -> SavedModel | KeptModel:
        output = kept_with(self._launch.output, reporter.scheduler)
        return saved_model(output, self._launch.attempt)

    def _evaluate_and_save(
        self,
        parts: Parts,
        reporter: Reporter,
        saved: SavedModel | KeptModel,
        diverged: DivergedError | None,
    ) -> None:
        """Write the stage's weights, predict what was held out, and complete the model."""
        self._write_weights(parts, saved)
        measured = self._evaluate(parts) if diverged is None else {}
        results = self._metrics(measured)
        parts.executor.drain()
        if not self._share.place.leads:
            reporter.send("trained")
            return
        output = self._save(parts, saved, results)
        if diverged is None:
            check_saved(self._share, parts.client, output, measured)
            reporter.send("done", metrics=results, output=output)
        else:
            reason = end_reason_of(diverged)
            reporter.send("failed", error=told(diverged), end_reason=reason, output=output)

    def _wait_for_topology(self) -> Topology:
        """The scheduler's word, which comes once the last of all workers listens.

        However long that takes: who does not start, and a node that goes away, end this worker too.
        """
        while not self._service.started.wait(0.1):
            if self._stop.is_set():
                raise Stopped("stopped")
        assert self._service.topology is not None
        return self._service.topology

    def _train(self, parts: Parts) -> None:
        share, job, executor = self._share, self._launch.job, parts.executor
        self._load_tables(parts)
        source = None
        if share.place.stage == 0:
            source = TrainingSource(
                share.batches,
                executor.own,
                range(share.beginning.step, share.schedule.steps),
                share.staleness,
                parts.rows,
                executor.upload,
                self._inbox,
            )
        precision = job.train.precision or "fp32"
        _log.info("training %d steps in %s on %s", share.schedule.steps, precision, share.device)
        executor.train(source)
        share.batches.close()
        _log.info("trained in %.1f s", executor.progress.train_seconds)

    def _load_tables(self, parts: Parts) -> None:
        """Wait until the tables hold what the training begins with; the judge has it loaded."""
        share, place = self._share, self._share.place
        beginning, notices = share.beginning, parts.notices
        if not beginning.tables:
            return
        if place.stage == place.rank == 0:
            try:
                rows = parts.client.load(beginning.tables, rename=beginning.rename)
            except CheckpointError as error:
                kind = CutError if beginning.step else ModelError
                raise kind(f"{beginning.tables}: {error}") from error
            _log.info("%d rows loaded from %s", rows, beginning.tables)
            for stage, width in enumerate(place.widths):
                for rank in range(width):
                    notices.tell((stage, rank), LOADED, beginning.step)
        self._inbox.wait(lambda: notices.board.has(LOADED, beginning.step))

    def _write_weights(self, parts: Parts, saved: SavedModel | KeptModel) -> None:
        """Write the stage's weights: before the next phase ends, so that the last stage has them.

        All workers of the stage call it: each has its own experts.
        """
        state = {**whole_state(self._share.graph.module, parts.group), **self._share.graph.uncalled}
        if self._share.place.rank == 0:
            saved.write_stage(self._share.place.stage, state)

    def _evaluate(self, parts: Parts) -> dict[Split, Measured]:
        """Predict the held-out splits."""
        job = self._launch.job
        splits: list[Split] = []
        if job.data.valid:
            splits.append("valid")
        if job.data.test:
            splits.append("test")
        return {split: parts.executor.evaluate(split) for split in splits}

    def _metrics(self, measured: Mapping[Split, Measured]) -> dict[str, float]:
        """The metrics of the held-out splits, where this worker leads; else none."""
        loss, results = self._launch.job.train.loss, dict[str, float]()
        for split, one in measured.items():
            if self._share.place.leads:
                results |= metrics.measure(loss, one.scores.numpy(), one.labels.numpy(), split)
        return results

    def _save(self, parts: Parts, saved: SavedModel | KeptModel, results: dict[str, float]) -> str:
        """Save the tables and complete the model; where it is."""
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
        stages = len(self._share.place.widths)
        return saved.finish(self._launch.job, stages, progress.losses, facts)
