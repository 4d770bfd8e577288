"""What a model says of its plans without being run: its layers, and what holds them together."""

from protos.decision_pb2 import Layer, Workload
from protos.job_pb2 import JobSpec
from workers.model.entry import job_model
from workers.model.trace import TracedModel


def look(job: JobSpec) -> Workload:
    """The workload of a job's model without costs.

    Raises:
        ModelError: the model cannot be built or traced.
    """
    traced = TracedModel(job_model(job))
    layers = [Layer(name=info.name, kind=info.kind) for info in traced.layers]
    return Workload(name=job.name, layers=layers)
