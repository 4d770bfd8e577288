"""More workers for the profiler, so that k units are measured as k processes at once.

The profiler is rank 0 and leads: peers wait for it, then time the same batches in the groups
that it announces. Usage: python -m workers.profiler_peers --request FILE --rank R --leader H:P
"""

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from chassis import process
from chassis.closing import Closing
from chassis.process import Child, last_lines, module_argv, spawn, stop_all
from protos.decision_pb2 import LinearRoute
from protos.job_pb2 import TrainSpec
from protos.node_pb2 import ProfileRequest
from protos.stage_pb2 import JoinReply, JoinRequest
from ps import ParameterClient
from workers.device.units import compute_environment
from workers.learning.precision import Precision
from workers.links.all_reduce import Rendezvous, StageGroup, join_processes
from workers.links.ring_port import RingPort
from workers.model.chain.compiled import compile_layers
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import job_model
from workers.model.module.inputs import inputs_of
from workers.model.objective.loss import job_loss
from workers.ops.linear import Routes
from workers.ops.routed_linear import route
from workers.profiling.rows import ShardRows
from workers.profiling.timing import LayerTimer, Part, RowPart, first_of, share_of
from workers.stage.experts.offloading import take_all_out
from workers.stage.experts.outside import built_in, folder_of

_LOOPBACK = "127.0.0.1"
_START_S = 120.0


class PeersError(RuntimeError):
    """A worker of the profiler ended; quotes what it wrote."""


@dataclass(frozen=True, slots=True)
class GroupTimings:
    """Seconds of the slowest of a group.

    Args:
        compute: by `Part`, [batches, layers, parts].
        rows: by `RowPart`, likewise.
        reduce: of summing the dense gradients, [batches].
    """

    compute: NDArray[np.float64]
    rows: NDArray[np.float64]
    reduce: NDArray[np.float64]


class Peers(Closing):
    """The processes of ranks 1 to `count`, and the groups that rank 0 forms with them.

    Starting them returns at once: they load while the leader does.
    """

    def __init__(
        self,
        count: int,
        request: Path,
        directory: Path,
        device: torch.device,
        runs: Sequence[range] = (),
    ) -> None:
        self._device = device
        self._directory = directory
        self._control = Rendezvous(_LOOPBACK)
        self._children: list[Child] = []
        try:
            for rank in range(1, count + 1):
                argv = module_argv(
                    "workers.profiling.peers",
                    *("--request", str(request), "--rank", str(rank)),
                    *("--leader", self._control.address, "--device", device.type),
                    *("--runs", ",".join(str(run.stop) for run in runs)),
                )
                self._children.append(
                    spawn(
                        f"profiler {rank}",
                        argv,
                        directory=directory,
                        environment=compute_environment(torch.get_num_threads()),
                    )
                )
        except BaseException:
            self.close()
            raise

    def begin(
        self,
        batches: list[dict[str, Tensor]],
        shard: str,
        units: Sequence[int],
        size: int,
        routes: Sequence[LinearRoute],
    ) -> None:
        """Give the peers their data, and wait until all are ready.

        Args:
            units: sizes of the groups that will be formed, in order.
            size: samples of a micro-batch.
            routes: of products of `nn.Linear` on this machine's type.

        Raises:
            PeersError: one of them could not start.
        """
        path = self._directory / "batches.pt"
        torch.save(batches, path)
        self._put("batches", str(path))
        told: Any = TrainSpec(routes=routes).SerializeToString()
        self._put("routes", told)
        self._put("shard", shard)
        self._put("size", str(size))
        self._put("units", ",".join(map(str, units)))
        for child in self._children:
            try:
                child.wait_ready(_START_S)
            except process.ChildError as error:
                raise PeersError(str(error)) from None

    def time(
        self, timer: LayerTimer, batches: Sequence[dict[str, Tensor]], units: int, size: int
    ) -> GroupTimings:
        """Time `units` workers at once, the leader being one of them; the slowest counts.

        Args:
            batches: the rows of a worker's share of each are moved.
            size: samples of a micro-batch, the first of each of the batches.

        Raises:
            PeersError: a peer ended.
        """
        rendezvous = Rendezvous(_LOOPBACK)
        self._put(f"group/{units}", f"{rendezvous.address},{len(batches)}")
        try:
            group = _group(
                0, units, self._control.store, rendezvous.address, rendezvous, self._device
            )
            try:
                own = _time_together(timer, batches, group, size)
                others = [self._receive(units, rank) for rank in range(1, units)]
                group.barrier()
            finally:
                group.close()
        except RuntimeError as error:
            for child in self._children:
                if child.poll():
                    raise PeersError(f"{child.label} ended\n{last_lines(child.log)}") from error
            raise
        slowest = np.max([own, *(other.reshape(own.shape) for other in others)], axis=0)
        compute, rows, reduce = np.split(
            slowest, np.cumsum([len(timer.graphs) * n for n in (len(Part), len(RowPart))]), axis=1
        )
        shape = len(batches), len(timer.graphs), -1
        return GroupTimings(compute.reshape(shape), rows.reshape(shape), reduce[:, 0])

    def close(self) -> None:
        """End the peers; safe to repeat."""
        stop_all(self._children, 0.5)

    def _put(self, key: str, value: str) -> None:
        self._control.store.set(key, value)

    def _receive(self, units: int, rank: int) -> NDArray[np.float64]:
        return np.frombuffer(self._control.store.get(_timings(units, rank)), dtype=np.float64)


def _time_together(
    timer: LayerTimer, batches: Sequence[dict[str, Tensor]], group: StageGroup, size: int
) -> NDArray[np.float64]:
    """This worker's timings, flat: computing, rows, the reduction: [batches, layers·parts + 1]."""
    compute = timer.time([first_of(batch, size) for batch in batches], group)
    shares = [share_of(batch, group.rank, group.size) for batch in batches]
    rows = timer.time_rows(shares, group)
    reduce_s = timer.time_reduce(group, len(batches))
    flat = (compute.reshape(len(batches), -1), rows.reshape(len(batches), -1))
    return np.concatenate([*flat, reduce_s[:, None]], axis=1)


def _group(
    rank: int,
    units: int,
    store: Any,
    rendezvous: str,
    own: Rendezvous | None,
    device: torch.device,
) -> StageGroup:
    """The group of the first `units` workers, which all call it."""
    port = RingPort(rank, units, _LOOPBACK)
    before, after = (rank - 1) % units, (rank + 1) % units
    admitted = port.admit(JoinRequest(rank=before, size=units))
    store.set(f"ring/{units}/{rank}", admitted.SerializeToString())
    reply = JoinReply.FromString(store.get(f"ring/{units}/{after}"))
    if device.type == "cuda":
        join_processes(rank, units, rendezvous, own, device)
    ring = port.join(reply, _LOOPBACK, lambda: False)
    return StageGroup(device, ring, has_processes=device.type == "cuda")


def _timings(units: int, rank: int) -> str:
    return f"timings/{units}/{rank}"


def main(argv: list[str] | None = None) -> int:
    """A peer: the exit code."""
    parser = argparse.ArgumentParser(prog="workers.profiler_peers", description=__doc__)
    parser.add_argument("--request", required=True, type=Path)
    parser.add_argument("--rank", required=True, type=int)
    parser.add_argument("--leader", required=True, metavar="HOST:PORT")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--runs", default="", help="numbers of the layers that runs end before")
    parser.add_argument("--ready-file", type=Path)
    options = parser.parse_args(argv)
    process.setup_logging(f"profiler {options.rank}")
    process.lifeline()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    device = torch.device("cpu")
    if options.device == "cuda":
        device = torch.device("cuda", options.rank)
        torch.cuda.set_device(device)
    job = ProfileRequest.FromString(options.request.read_bytes()).job
    ends = [int(end) for end in options.runs.split(",") if end]
    runs = [range(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    folder = folder_of(job)
    with built_in(folder):
        model = job_model(job).train()
    traced = TracedModel(model if runs else model.to(device), inputs_of(job.data))
    compile_layers(traced, job.train.compile)
    if folder is not None and device.type == "cpu":
        take_all_out(job, traced.model, folder)
    host, _, port = options.leader.rpartition(":")
    store: Any = dist.TCPStore(  # type: ignore[attr-defined]
        host, int(port), is_master=False, timeout=timedelta(hours=1)
    )
    batches = torch.load(Path(store.get("batches").decode()))
    route(traced.model, Routes(TrainSpec.FromString(store.get("routes")).routes))
    with ParameterClient([store.get("shard").decode()]) as client:
        rows = ShardRows(traced.model, client, device, create=False)
        precision = Precision.of(job.train.precision, device)
        loss = job_loss(job)
        timer = LayerTimer(traced, job.train.optimizer, rows, device, precision, loss, runs)
        size = int(store.get("size").decode())
        timer.time([first_of(batches[0], size)])  # the first run allocates and compiles
        process.announce(options.ready_file)
        for units in map(int, filter(None, store.get("units").decode().split(","))):
            if options.rank >= units:
                continue
            address, count = store.get(f"group/{units}").decode().split(",")
            group = _group(options.rank, units, store, address, None, device)
            own = _time_together(timer, batches[: int(count)], group, size)
            store.set(_timings(units, options.rank), own.tobytes())
            group.barrier()  # until the leader has read them
            group.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
