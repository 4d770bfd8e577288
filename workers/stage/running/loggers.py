"""Loggers: callbacks that write a training's figures by TensorBoard, W&B or MLflow.

An attempt, or a generation of workers, that goes on writes into the same run, and each figure of a
step once: what a run has already is left out. The libraries are the user's: extras of the package.
"""

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from google.protobuf.json_format import MessageToDict

from chassis.files import aside
from protos.job_pb2 import JobSpec
from workers.model.code.entry import ModelError, integral
from workers.stage.running.callbacks import TrainingState

_FLUSH_S = 1.0


class Logger(ABC):
    """One of them, as a callback."""

    def __init__(self) -> None:
        self._last: dict[str, int] = {}  # of each figure the last step that the run has

    def on_begin(self, state: TrainingState) -> None:
        """Open the job's run, or go on with it."""
        self._last = dict(self.open(state))

    def on_step(self, state: TrainingState) -> None:
        """Write losses and learning rate."""
        terms = state.losses if state.losses.keys() != {"loss"} else {}
        figures = {"train/loss": state.loss, "train/learning_rate": state.learning_rate}
        self._write(state.step, figures | {f"train/loss_{name}": v for name, v in terms.items()})

    def on_eval(self, state: TrainingState, metrics: Mapping[str, float]) -> None:
        """Write what held-out data gave: SPLIT/METRIC."""
        self._write(state.step, {n.replace("_", "/", 1): value for n, value in metrics.items()})

    def on_end(self, state: TrainingState) -> None:
        """Close the run; it may be gone on with."""
        self.close(failed=bool(state.error))

    @abstractmethod
    def open(self, state: TrainingState) -> Mapping[str, int]:
        """Open the job's run; of each figure the last step that it has."""

    @abstractmethod
    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """Write some figures of a step, which the run does not have yet."""

    @abstractmethod
    def close(self, *, failed: bool) -> None:
        """Write all that is left."""

    def _write(self, step: int, figures: Mapping[str, float]) -> None:
        fresh = {name: v for name, v in figures.items() if step > self._last.get(name, -1)}
        self._last.update(dict.fromkeys(fresh, step))
        if fresh:
            self.write(step, fresh)


class TensorBoard(Logger):
    """Event files in DIRECTORY/JOB_ID."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self._writers = _imported("torch.utils.tensorboard", "tensorboard", "tensorboard")
        self._directory = directory
        self._flushed = 0.0

    def open(self, state: TrainingState) -> Mapping[str, int]:
        """As `Logger.open`."""
        folder = str(self._directory / state.job_id)
        accumulators = import_module("tensorboard.backend.event_processing.event_accumulator")
        there = accumulators.EventAccumulator(folder, size_guidance={"scalars": 1})
        found: dict[str, int] = {}
        with suppress(accumulators.directory_watcher.DirectoryDeletedError):
            there.Reload()
            tags = there.Tags()["scalars"]
            found = {tag: there.Scalars(tag)[-1].step for tag in tags}
        self._writer = self._writers.SummaryWriter(folder)
        return found

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """As `Logger.write`."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        if time.monotonic() - self._flushed > _FLUSH_S:
            self._writer.flush()
            self._flushed = time.monotonic()

    def close(self, *, failed: bool) -> None:
        """As `Logger.close`."""
        self._writer.close()


class Wandb(Logger):
    """A run of W&B with the job's id; offline ones, to be synced later, are in DIRECTORY/wandb."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__()
        self._wandb = _imported("wandb", "wandb", "wandb")
        self._directory = directory
        self._options = options

    def open(self, state: TrainingState) -> Mapping[str, int]:
        """As `Logger.open`."""
        self._directory.mkdir(parents=True, exist_ok=True)
        options = {"project": "heterps", "name": state.name, **self._options}
        self._run = self._wandb.init(
            **options, id=state.job_id, resume="allow", dir=str(self._directory)
        )
        # An offline run does not know what the one before it has.
        self._note = self._directory / f".{state.job_id}.wandb.json"
        found: dict[str, int] = {}
        with suppress(FileNotFoundError):
            found = json.loads(self._note.read_text())
        return found

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """As `Logger.write`."""
        self._run.log(dict(figures), step=step)
        with aside(self._note) as note:
            note.write_text(json.dumps(self._last))

    def close(self, *, failed: bool) -> None:
        """As `Logger.close`."""
        self._run.finish(exit_code=int(failed))


class MLflow(Logger):
    """A run of MLflow with the job's id as its tag."""

    def __init__(self, directory: Path, **options: Any) -> None:
        super().__init__()
        self._tracking = _imported("mlflow.tracking", "mlflow", "mlflow")
        self._entities = import_module("mlflow.entities")
        self._uri = options.pop("tracking_uri", "")
        if not self._uri:
            directory.mkdir(parents=True, exist_ok=True)
            self._uri = f"sqlite:///{directory}/mlflow.db"
        self._experiment = options.pop("experiment", "heterps")
        if options:
            raise ModelError(
                f"train.loggers.mlflow.{min(options)}: unknown; expected directory, tracking_uri, "
                "experiment"
            )

    def open(self, state: TrainingState) -> Mapping[str, int]:
        """As `Logger.open`."""
        client = self._client = self._tracking.MlflowClient(tracking_uri=self._uri)
        experiment = client.get_experiment_by_name(self._experiment)
        number = (
            client.create_experiment(self._experiment)
            if experiment is None
            else experiment.experiment_id
        )
        runs = client.search_runs([number], f"tags.`job_id` = '{state.job_id}'")
        if not runs:
            tags = {"job_id": state.job_id}
            self._run = client.create_run(number, run_name=state.name, tags=tags).info.run_id
            return {}
        self._run = runs[0].info.run_id
        client.update_run(self._run, status="RUNNING")
        names = client.get_run(self._run).data.metrics
        histories = {name: client.get_metric_history(self._run, name) for name in names}
        return {name: max(point.step for point in points) for name, points in histories.items()}

    def write(self, step: int, figures: Mapping[str, float]) -> None:
        """As `Logger.write`."""
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(name, v, now, step) for name, v in figures.items()]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, *, failed: bool) -> None:
        """As `Logger.close`."""
        self._client.set_terminated(self._run, "FAILED" if failed else "FINISHED")


LOGGERS: Final = {"tensorboard": TensorBoard, "wandb": Wandb, "mlflow": MLflow}


def job_loggers(job: JobSpec, folder: str) -> dict[str, Logger]:
    """A job's loggers by their keys.

    Args:
        folder: where relative directories are; empty: nowhere.

    Raises:
        ModelError: a library is not installed, or an argument is wrong.
    """
    found = {}
    for name, given in sorted(job.train.loggers.items()):
        key = f"train.loggers.{name}"
        arguments = {n: integral(value) for n, value in MessageToDict(given).items()}
        directory = Path(folder, str(arguments.pop("directory", "logs")))
        if not directory.is_absolute():
            text = "expected an absolute path, as the job has no output"
            raise ModelError(f"{key}.directory: {directory}: {text}")
        try:
            found[key] = LOGGERS[name](directory, **arguments)
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{key}: {type(error).__name__}: {error}") from error
    return found


def _imported(module: str, package: str, extra: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise ModelError(
            f"train.loggers.{extra}: {package} is not installed where the job runs ({error}); "
            f"expected it there: pip install 'heterps[{extra}]'"
        ) from None
