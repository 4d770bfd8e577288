"""A saved model as commands name it, and what is wrong with it."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from heterps.commands import complete, lookup
from heterps.errors import FetchError, ModelUseError

HELP = "MODEL is the folder of a saved model or of a checkpoint, or a job whose model is kept."
argument = click.argument("model", metavar="MODEL", shell_complete=complete.jobs)


@contextmanager
def folder_of(model: str) -> Iterator[str]:
    """The folder of a model, or of a job's, which is fetched for as long as it is needed.

    Raises:
        UnknownJobError, UnreachableError, FetchError: it is no folder, and of no job.
    """
    if Path(model).exists():
        yield model
        return
    client, job = lookup.find(model)
    if client is None:
        if not job.output:
            raise FetchError(f"job {job.job_id}: it left no model")
        yield job.output
        return
    with client, tempfile.TemporaryDirectory(prefix="heterps-model-") as folder:
        fetched = client.get(job.job_id, Path(folder, job.job_id))
        if not fetched.model:
            raise FetchError(f"job {job.job_id}: {fetched.note}")
        yield fetched.folder


@contextmanager
def explained() -> Iterator[None]:
    """What is wrong with a model or with data, in words alone.

    Raises:
        ModelUseError: in place of it.
    """
    from ps.errors import CheckpointError
    from workers.data.errors import DataError
    from workers.model.code.entry import ModelError
    from workers.model.saved.cut import CutError

    try:
        yield
    except (DataError, ModelError, CutError, CheckpointError) as error:
        raise ModelUseError(str(error)) from None
    except BrokenPipeError:
        raise  # whoever read standard output has gone
    except OSError as error:
        raise ModelUseError(f"{error.filename or 'a file'}: {error.strerror or error}") from None
