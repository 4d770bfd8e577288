"""What a stage takes whose layers take no time: what is called between them, and copies for them.

A profile's cost of a layer has that in it, so where the layer sleeps for its cost it would be taken
twice.
"""

from itertools import pairwise
from statistics import median

import torch
from torch import nn

from protos.job_pb2 import JobSpec
from ps import LocalShards, ParameterClient
from workers.data import Dataset, GlobalBatches
from workers.data.tensors import tensors_of
from workers.learning.precision import Precision
from workers.model.chain.trace import TracedModel
from workers.model.code.entry import job_model
from workers.model.module.inputs import inputs_of
from workers.model.objective.loss import job_loss
from workers.profiling.rows import ShardRows
from workers.profiling.timing import LayerTimer, Part

_WARM, _REPEATS = 2, 9
_HERE = torch.device("cpu")


def time_besides(job: JobSpec, cuts: tuple[int, ...], samples: int) -> list[tuple[float, float]]:
    """Seconds of a micro-batch's forward and backward in each stage: [stages].

    Args:
        job: with a model whose layers take no time; all of them, and no rows.
        cuts: the last layer of each stage.
        samples: of a micro-batch.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        model: nn.Module = job_model(job).train()
        traced = TracedModel(model, inputs_of(job.data))
        batches = GlobalBatches.of(job, Dataset.of(job, "train"))
        batch = tensors_of(batches.read(0, 0, min(samples, batches.samples(0))))
        with LocalShards(1) as shards, ParameterClient(shards.addresses) as client:
            timer = LayerTimer(
                traced,
                job.train.optimizer,
                ShardRows(model, client, _HERE, create=False),
                _HERE,
                Precision.of(job.train.precision, _HERE),
                job_loss(job),
            )
            stages = pairwise((-1, *cuts))
            timer.graphs = [traced.stage(before + 1, last) for before, last in stages]
            timer.parameters = [[] for _ in cuts]
            timer.optimizers = [None for _ in cuts]
            times = timer.time([batch] * (_WARM + _REPEATS))[_WARM:]
    finally:
        torch.set_num_threads(threads)
    return [
        (median(times[:, stage, Part.FORWARD]), median(times[:, stage, Part.BACKWARD]))
        for stage in range(len(cuts))
    ]
