"""What a model says of its plans without being measured: its layers and their ties."""

from collections.abc import Sequence

from protos.decision_pb2 import Layer, Workload
from protos.job_pb2 import JobSpec
from workers.model.chain.trace import TracedModel
from workers.model.checks.graph import check_graph
from workers.model.checks.made_again import check_made_again
from workers.model.checks.probe import alone_in, check_parameters, micro_batches_of, structures_of
from workers.model.code.entry import job_model
from workers.model.module.inputs import inputs_of
from workers.model.module.sharing import Sharing
from workers.model.objective.loss import job_loss
from workers.stage.experts.outside import built_in, folder_of


def look(job: JobSpec) -> Workload:
    """The workload of a job's model without costs.

    Raises:
        ModelError: the model cannot be built or traced.
        DataError: the first samples do not fit the job.
    """
    with built_in(folder_of(job)):
        model = job_model(job)
        traced = TracedModel(model, inputs_of(job.data))
    check_parameters(traced, job)
    check_made_again(model, job)
    if job.train.offload.memory:
        from workers.offload.training.suited import check_suited

        check_suited(job, traced.model, [layer.name for layer in traced.layers])
    check_graph(traced, job)
    traced.keep_whole(structures_of(traced, job))
    names, alone = [info.name for info in traced.layers], alone_in(traced, job)
    layers = [
        Layer(
            name=info.name,
            kind=info.kind,
            uncut=uncut,
            alone=info.name in alone,
            shares=shares_of(traced.sharing, names, index) if uncut else "",
        )
        for index, (info, uncut) in enumerate(zip(traced.layers, traced.uncut, strict=True))
    ]
    return Workload(
        name=job.name,
        layers=layers,
        micro_batches=micro_batches_of(job, traced),
        whole_batch=job_loss(job).whole,
    )


def shares_of(sharing: Sequence[Sharing], names: Sequence[str], layer: int) -> str:
    """What keeps a layer and the one after it together, as `'head' and 'embed' share 'w'`."""
    spans = [one for one in sharing if one.first <= layer < one.last]
    return ", ".join(
        f"{names[one.first]!r} and {names[one.last]!r} share {one.what!r}" for one in spans
    )
