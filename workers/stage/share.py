"""What one worker is to compute: its share of the model, the data and the schedule."""

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from protos.naming import table_prefix
from protos.node_pb2 import LaunchRequest
from workers.data import Dataset, GlobalBatches
from workers.data.check import check_all
from workers.data.held_out import HeldOut
from workers.device.units import VISIBLE
from workers.embedding.sparse import SparseEmbedding, tables_of
from workers.embedding.spec import EmbeddingSpec
from workers.errors import UnfitPlanError
from workers.learning.precision import Precision
from workers.links.pipeline import Place
from workers.model.chain.compiled import compile_layers
from workers.model.chain.graph import StageGraph
from workers.model.chain.trace import LayerInfo, TracedModel
from workers.model.checks.graph import check_graph
from workers.model.checks.objective import check_loss, check_metrics
from workers.model.checks.probe import check_parameters, micro_batches_of
from workers.model.code.entry import job_model
from workers.model.module.inputs import inputs_of
from workers.model.module.whole import check_smallest
from workers.model.saved.warm_start import Weights, give_weights, read_weights
from workers.ops.linear import Routes, of_type
from workers.stage.cuts.beginning import Beginning, beginning_of, check_entry
from workers.stage.cuts.state import base_names, give
from workers.stage.experts.outside import built_in, folder_of
from workers.stage.steps.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Share:
    """What a worker is to compute; needs nobody else.

    Args:
        layers: of the whole model.
        graph: the stage's, on the host.
        fixed: whether the job, not the plan, fixes the number of micro-batches.
        staleness: updates that a step lacks.
        beginning: of the training; the graph's layers are as they are then.
        routes: of products of the stage's `nn.Linear`, as of the decision.
        weights: that the job's own training begins with.
        contents: of the splits that this worker reads, as of `Dataset`, a line each.
        held_out: the job's held-out splits.
        all_tables: of the whole model, by name.
        folder: for experts that lie out of memory; None: all are in it.
        rooms: bytes of memory for those of each layer.
    """

    launch: LaunchRequest
    place: Place
    device: torch.device
    precision: Precision
    layers: tuple[LayerInfo, ...]
    graph: StageGraph
    batches: GlobalBatches
    schedule: Schedule
    fixed: bool
    staleness: int
    routes: Routes
    beginning: Beginning
    weights: Weights | None
    contents: str
    held_out: HeldOut
    all_tables: Mapping[str, EmbeddingSpec]
    folder: Path | None
    rooms: Mapping[str, int]

    @property
    def tables(self) -> str:
        """What the names of the job's tables begin with."""
        return table_prefix(self.launch.job_id)

    @staticmethod
    def of(launch: LaunchRequest, *, anew: bool = False) -> "Share":
        """The share of a launched worker; makes its device the process's current one.

        Args:
            anew: of another generation, which `begun` tells where to begin.

        Raises:
            ModelError, DataError, PrecisionError: the job does not fit.
            UnfitPlanError: the plan is one of another model, or computes layers as is not possible
                here.
            UnfitCutError: the cut to go on from, or the job's code, is not that of the job.
            RuntimeError: its GPU is not there.
        """
        job, plan = launch.job, launch.stages[launch.index]
        place = Place(launch.index, launch.rank, tuple(stage.units for stage in launch.stages))
        device = _device(launch)
        precision = Precision.of(job.train.precision, device)
        routes = Routes(of_type(job.train.routes, plan.type) if device.type == "cpu" else ())
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        folder = folder_of(job)
        check_entry(job)
        with built_in(folder):
            traced = TracedModel(job_model(job), inputs_of(job.data))
        names = [layer.name for layer in traced.layers]
        rooms: Mapping[str, int] = {}
        if folder is not None:
            from workers.offload.training.suited import check_suited, rooms_of

            check_suited(job, traced.model, names)
            rooms = rooms_of(job, traced.model)
        if names != list(launch.layers):
            raise UnfitPlanError(
                f"{job.model.entry}: its layers are {', '.join(names)}; expected those that were "
                f"planned, {', '.join(launch.layers)}"
            )
        first = place.stage == place.rank == 0 and not anew
        if first:  # held-out splits, too, before anything is trained
            check_all(job)
            check_parameters(traced, job)
            check_graph(traced, job)
            check_loss(traced, job)
            check_metrics(traced, job)
        dataset = Dataset.of(job, "train")
        contents, held_out = [dataset.contents], HeldOut(job)
        if place.stage == 0 or place.leads:  # who measures, and who compares the saved model
            contents += held_out.contents()
        batches = GlobalBatches.of(job, dataset)
        fixed = micro_batches_of(job, traced)
        schedule = Schedule(
            batches.steps,
            batches.samples,
            fixed or planned_micro_batches(launch),
            lockstep=place.widths if job.train.split_experts else (),
        )
        if batches.steps and not schedule.lockstep:
            last = min(batches.steps_per_epoch or batches.steps, batches.steps) - 1
            check_smallest(traced.model, batches.samples(last) // schedule.count(last))
        weights: Weights | None = None
        if job.train.warm_start and not launch.resume:
            weights = read_weights(job.train.warm_start)
            give_weights(traced.model, weights, base_names(names), tell=first)
        compile_layers(traced, job.train.compile)
        graph, staleness = traced.stage(plan.first, plan.last), staleness_of(launch)
        beginning = Beginning()
        if not anew:
            beginning = beginning_of(
                launch, graph, staleness, weights, place=launch.resume, folder=folder
            )
        beginning.check_contents("\n".join(contents), job)
        batches.go_on(beginning.position)
        return Share(
            launch,
            place,
            device,
            precision,
            traced.layers,
            graph,
            batches,
            schedule,
            fixed > 0,
            staleness,
            routes,
            beginning,
            weights,
            "\n".join(contents),
            held_out,
            tables_of(m for m in traced.model.modules() if isinstance(m, SparseEmbedding)),
            folder,
            rooms,
        )

    def begun(self, kept: Beginning | None, place: str) -> "Share":
        """The same with the state that a worker has kept; None: with that of the cut at `place`."""
        if kept is None:
            beginning = beginning_of(
                *(self.launch, self.graph, self.staleness, self.weights),
                place=place,
                folder=self.folder,
            )
            beginning.check_contents(self.contents, self.launch.job)
            self.batches.go_on(beginning.position)
            return replace(self, beginning=beginning)
        kept.check_contents(self.contents, self.launch.job)
        assert kept.state is not None
        give(self.graph, kept.state)
        return replace(self, beginning=kept)


def planned_micro_batches(launch: LaunchRequest) -> int:
    """Micro-batches of a step by the plan, where it says none enough to have all workers busy."""
    widths = [stage.units for stage in launch.stages]
    few = widths[0] if len(widths) == 1 else max(4, *widths)
    return launch.micro_batches or few


def staleness_of(launch: LaunchRequest) -> int:
    """Updates that a step lacks: the plan's, else the job's.

    None where experts are split, or out of memory.
    """
    if launch.job.train.split_experts or launch.job.train.offload.memory:
        return 0
    return launch.staleness if launch.HasField("staleness") else launch.job.train.staleness


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
