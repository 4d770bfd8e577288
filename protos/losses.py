"""Built-in losses that hold the samples of a batch against one another."""

from typing import Final

from protos.job_pb2 import JobSpec

CONTRASTIVE: Final = "contrastive"  # which alone needs no label
OF_WHOLE_BATCHES: Final = (CONTRASTIVE, "in_batch_softmax", "pairwise")


def of_whole_batches(job: JobSpec) -> bool:
    """Whether a built-in loss of the job has no parts: it is taken of whole batches at once."""
    names = [job.train.loss, *(head.loss for head in job.train.heads.values())]
    return any(name in OF_WHOLE_BATCHES for name in names)


def may_lack_labels(job: JobSpec) -> bool:
    """Whether the job learns without a label, or may: what its own loss reads nobody knows."""
    names = [head.loss for head in job.train.heads.values()] or [job.train.loss]
    return bool(job.model.loss) or all(name == CONTRASTIVE for name in names)
