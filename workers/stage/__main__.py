"""The process of one worker of one stage: `python -m workers.stage --launch FILE`."""

import argparse
import logging
import os
import sys
import threading
from pathlib import Path

import torch

from chassis import process, tracing
from chassis.exits import exit_code_of
from chassis.logs import log_fields
from chassis.security import is_loopback
from protos.naming import kept_with, table_prefix
from protos.node_pb2 import LaunchRequest
from protos.stage_pb2 import StageWorkers, Topology
from ps import ParameterClient
from workers.data import Dataset
from workers.data.reader import Split
from workers.device.copies import Staging, staging_for
from workers.device.units import VISIBLE
from workers.learning import quality as metrics
from workers.learning.precision import Precision
from workers.links.all_reduce import Rendezvous, StageGroup
from workers.links.combine import Combiner, Hub, hosts_of
from workers.links.inbox import Inbox, Stopped
from workers.links.outbox import Outbox
from workers.links.transport import Neighbours, StageService
from workers.model.code import enter
from workers.model.entry import job_model
from workers.model.saved import saved_model
from workers.model.trace import TracedModel
from workers.stage.executor import StageExecutor
from workers.stage.experts import split_experts, whole_state
from workers.stage.failure import end_reason_of
from workers.stage.progress import Reporter
from workers.stage.rows import StageRows
from workers.stage.source import Schedule, TrainingSource
from workers.stage.staleness import StalenessGate

_log = logging.getLogger("heterps.stage")
_START_TIMEOUT_S = 120.0
_SILENCE_S = 30.0  # how long a shard may not answer
_OUTAGE_S = 300.0  # the same of one that its node starts again: it reads what it kept first


def main(argv: list[str] | None = None) -> int:
    """Run one worker to the job's end; 0 when it succeeded or was stopped on request."""
    parser = argparse.ArgumentParser(prog="workers.stage", description=__doc__)
    parser.add_argument("--launch", required=True, type=Path, help="serialized LaunchRequest")
    parser.add_argument("--ready-file", type=Path)
    parser.add_argument("--bind", default="127.0.0.1:0")
    arguments = parser.parse_args(argv)
    launch = LaunchRequest.FromString(arguments.launch.read_bytes())
    process.setup_logging(f"stage {launch.index} worker {launch.rank}")
    log_fields(job=launch.job_id, stage=launch.index, worker=launch.rank)
    enter(launch.job)
    tracing.begin_job(launch.job_id)
    stop = threading.Event()
    process.install_signals(stop)
    try:
        Worker(launch, arguments.bind, stop, arguments.launch).run(arguments.ready_file)
    except Stopped:
        _log.info("stopped")
    except Exception as error:
        if stop.is_set():
            _log.info("stopped: %s", error)
            return 0
        _log.exception("failed")
        print(f"{type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return exit_code_of(end_reason_of(error))
    return 0


class Worker:
    """Builds this worker's part of the model, waits for the others, and runs."""

    def __init__(
        self, launch: LaunchRequest, bind: str, stop: threading.Event, source: Path | None = None
    ) -> None:
        self._launch = launch
        self._source = source
        self._stop = stop
        self._inbox = Inbox(stop)
        self._service = StageService(
            self._inbox, Hub(launch.stages[launch.index].units, stop.is_set)
        )
        self._widths = [stage.units for stage in launch.stages]
        self._index = launch.index
        self._namespace = table_prefix(launch.job_id)
        self._device = _device(launch)
        self._precision = Precision.of(
            launch.job.train.precision, self._device, stages=len(launch.stages)
        )
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        plan = launch.stages[self._index]
        self._traced = TracedModel(job_model(launch.job))
        self._graph = self._traced.stage(plan.first, plan.last)
        train = Dataset(launch.job.data, "train", launch.job.directory)
        self._dataset = train
        self._schedule = Schedule.of(launch.job, train, list(self._widths))
        before = self._widths[self._index - 1] if self._index else 0
        self._server = self._service.serve(bind, threads=8 + 8 * before + plan.units)
        host = self._server.address.rpartition(":")[0]
        shared = plan.units > 1 and launch.rank == 0
        self._rendezvous = Rendezvous(host) if shared else None

    def run(self, ready_file: Path | None) -> None:
        """Announce, wait for the topology, train, evaluate, save."""
        process.announce(
            ready_file,
            address=self._server.address,
            rendezvous=self._rendezvous.address if self._rendezvous else "",
        )
        topology = self._wait_for_topology()
        launch, job = self._launch, self._launch.job
        leads = launch.rank == 0 and self._index == len(self._widths) - 1
        interval_s = 0.5 if leads else 2.0
        reporter = Reporter(launch, self._schedule.steps, self._stop, interval_s, self._source)
        durable = job.servers.durability not in ("", "none")
        client = ParameterClient(
            list(topology.shards), timeout_s=_OUTAGE_S if durable else _SILENCE_S
        )
        staging = staging_for(self._device)
        before = self._outbox(topology, -1, staging)
        after = self._outbox(topology, +1, staging)
        own = topology.stages[self._index]
        group = StageGroup(
            launch.rank,
            len(own.addresses),
            own.rendezvous,
            self._rendezvous,
            self._device,
            self._combiner(own),
        )
        module = self._graph.module.to(self._device)
        split = split_experts(module, group) if job.train.split_experts else []
        if split:
            _log.info("experts of %s are split over %d workers", ", ".join(split), group.size)
        gate = StalenessGate(job.train.staleness, self._stop, ordered=self._index == 0)
        rows = StageRows(
            module,
            self._graph.keys_of,
            client,
            gate,
            staging,
            self._namespace,
            job.servers,
        )
        executor = StageExecutor(
            job,
            self._graph,
            stage=self._index,
            rank=launch.rank,
            widths=list(self._widths),
            schedule=self._schedule,
            rows=rows,
            group=group,
            inbox=self._inbox,
            before=before,
            after=after,
            staging=staging,
            precision=self._precision,
            device=self._device,
            stop=self._stop,
            lockstep=bool(split),
        )
        reporter.follow(executor.progress)
        log_fields(step=lambda: executor.progress.step)
        try:
            source = None
            if self._index == 0:
                source = TrainingSource(
                    *(job, self._dataset, self._schedule, launch.rank, rows, self._stop),
                    upload=executor.upload,
                )
            _log.info(
                "training %d steps in %s on %s",
                self._schedule.steps,
                job.train.precision or "fp32",
                self._device,
            )
            executor.train(source)
            _log.info("trained in %.1f s", executor.progress.train_seconds)
            self._finish(executor, group, client, reporter, leads)
        except Stopped:
            raise
        except Exception as error:
            if not self._stop.is_set():
                text = f"{type(error).__name__}: {error}"
                reporter.send("failed", error=text, end_reason=end_reason_of(error))
            raise
        finally:
            reporter.close()
            rows.close()
            for neighbour in (before, after):
                if neighbour is not None:
                    neighbour.close()
            client.close()
            group.close()
            self._server.stop(0.5)

    def _finish(
        self,
        executor: StageExecutor,
        group: StageGroup,
        client: ParameterClient,
        reporter: Reporter,
        leads: bool,
    ) -> None:
        job = self._launch.job
        saved = saved_model(kept_with(self._launch.output, reporter.scheduler))
        state = whole_state(self._graph.module, group)  # of all workers where experts are split
        if self._launch.rank == 0:  # before the next phase's END, so the last stage finds the file
            saved.write_stage(self._index, state)
        results: dict[str, float] = {}
        splits: list[Split] = []
        if job.data.valid:
            splits.append("valid")
        if job.data.test:
            splits.append("test")
        for split in splits:
            scores, labels = executor.evaluate(split)
            if leads:
                results |= metrics.measure(job.train.loss, scores.numpy(), labels.numpy(), split)
        executor.drain()
        if not leads:
            reporter.send("trained")
            return
        executor.progress.phase = "save"
        client.save(saved.tables, prefix=self._namespace)
        progress = executor.progress
        facts = {
            "job_id": self._launch.job_id,
            "layers": [layer.name for layer in self._traced.layers],
            "metrics": results,
            "steps": progress.step,
            "samples": progress.samples,
            "train_seconds": progress.train_seconds,
        }
        output = saved.finish(job, len(self._widths), progress.losses, facts)
        reporter.send("done", metrics=results, output=output)

    def _wait_for_topology(self) -> Topology:
        waited = 0.0
        while not self._service.started.wait(0.1):
            waited += 0.1
            if self._stop.is_set():
                raise Stopped("stopped")
            if waited > _START_TIMEOUT_S:
                raise TimeoutError(f"no Start within {_START_TIMEOUT_S:.0f} s of being ready")
        assert self._service.topology is not None
        return self._service.topology

    def _combiner(self, own: StageWorkers) -> Combiner | None:
        """What sums among workers on several hosts; None where torch.distributed may."""
        store, _, _ = own.rendezvous.rpartition(":")
        if len(hosts_of(list(own.addresses))) == 1 or not is_loopback(store):
            return None
        rank, stop = self._launch.rank, self._stop.is_set
        return Combiner(rank, own.addresses[0], None if rank else self._service.hub, stop)

    def _outbox(self, topology: Topology, step: int, staging: Staging) -> Outbox | None:
        index = self._index + step
        if not 0 <= index < len(topology.stages):
            return None
        addresses = topology.stages[index].addresses
        return Outbox(Neighbours(addresses, f"stage {index}", self._launch.rank), staging)


def _device(launch: LaunchRequest) -> torch.device:
    """The device of this worker, made the process's current one: nodes let it see its GPU alone."""
    if not launch.devices or launch.devices[launch.index] != "cuda":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(
            f"stage {launch.index} was planned for a GPU, and PyTorch {torch.__version__} finds "
            f"none ({VISIBLE}={os.environ.get(VISIBLE, 'unset')})"
        )
    device = torch.device("cuda", launch.rank % torch.cuda.device_count())
    torch.cuda.set_device(device)  # what NCCL's barriers go by
    return device


if __name__ == "__main__":
    sys.exit(main())
