"""TensorFlow's `ParameterServerStrategy`: sharded variables on its servers, rows in static arrays.

Steps are scheduled by its `ClusterCoordinator` on one worker, which lives in the client's process
with the coordinator; rows arrive at the worker, gradients begin there, ids come from its data set.
Sparse Adagrad of Keras on the servers. The client finds distinct ids (`tf.unique`) and sums
gradients. Ids are row numbers known beforehand. A pull also sums what arrived, a few additions
beside the rest, so that the coordinator need not fetch the rows out of the worker.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, ClassVar

import numpy as np

from bench.ps.peers import tf_cluster
from bench.ps.peers.client import run
from bench.ps.peers.peer import (
    EPSILON,
    INITIAL_ACCUMULATOR,
    LEARNING_RATE,
    Batch,
    Floats,
    Peer,
)

_WORKER = "/job:worker/replica:0/task:0/device:CPU:0"


@dataclass(slots=True)
class Prepared:
    """A batch on the worker, as an iterator that repeats it."""

    numbers: Any
    on_worker: Any


class TensorflowPs(Peer):
    """One coordinator with its worker, variables in `shards` parts."""

    dynamic: ClassVar[bool] = False

    def start(self) -> Sequence[int]:
        tf = self._tf = tf_cluster.tensorflow(addons=False)
        cluster, self._servers = tf_cluster.start(self.setting.shards, addons=False)
        spec = tf.train.ClusterSpec(cluster)
        self._worker = tf.distribute.Server(spec, "worker", 0, protocol="grpc")
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(spec, rpc_layer="grpc")
        parts = tf.distribute.experimental.partitioners.FixedShardsPartitioner(self.setting.shards)
        self._strategy = tf.distribute.ParameterServerStrategy(resolver, parts)
        self._coordinator = tf.distribute.coordinator.ClusterCoordinator(self._strategy)
        with tf.device(_WORKER):
            self._grads = tf.constant(self.data.workloads["zipf"][0].grads)
        self._pull = tf.function(lambda it: tf.reduce_sum(self._pulled(next(it))))
        self._push = tf.function(self._pushed)
        self._both = tf.function(self._pulled_and_pushed)
        self._read = tf.function(self._pulled)
        return [server.pid for server in self._servers]

    def versions(self) -> dict[str, str]:
        return {"tensorflow": version("tensorflow")}

    def fill(self) -> None:
        tf, rows = self._tf, len(self.data.universe)
        with self._strategy.scope():
            self._rows = tf.Variable(tf.zeros([rows, self.setting.dim]), name="rows")
            self._optimizer = tf.keras.optimizers.legacy.Adagrad(
                LEARNING_RATE, INITIAL_ACCUMULATOR, EPSILON
            )
        self._parts = list(getattr(self._rows, "variables", [self._rows]))
        # Gradients of zero make the accumulators, so that the memory measured has them.
        zero = tf.function(lambda numbers: self._strategy.run(self._step, args=(numbers, 0.0)))
        self._run(zero, tf.constant(self.data.workloads["zipf"][0].rows))

    def prepare(self, batch: Batch) -> Prepared:
        tf, numbers = self._tf, batch.rows

        def repeated() -> Any:
            return tf.data.Dataset.from_tensors(numbers).cache().repeat()

        return Prepared(numbers, iter(self._coordinator.create_per_worker_dataset(repeated)))

    def pull(self, batch: Prepared, mode: str) -> Any:
        return self._run(self._pull, batch.on_worker)

    def push(self, batch: Prepared, mode: str) -> None:
        self._run(self._push, batch.on_worker)

    def both(self, batch: Prepared, mode: str) -> None:
        self._run(self._both, batch.on_worker)

    def read(self, batch: Any) -> Floats:
        return np.asarray(self._run(self._read, self._tf.constant(batch.numbers)))

    def close(self) -> None:
        for server in self._servers:
            server.stop()

    def _run(self, function: Any, argument: Any) -> Any:
        return self._coordinator.schedule(function, args=(argument,)).fetch()

    def _pulled(self, numbers: Any) -> Any:
        unique, inverse = self._tf.unique(numbers)
        return self._tf.gather(self._tf.nn.embedding_lookup(self._rows, unique), inverse)

    def _pushed(self, batches: Any) -> Any:
        self._strategy.run(self._step, args=(next(batches),))
        return self._tf.constant(0)

    def _pulled_and_pushed(self, batches: Any) -> Any:
        numbers = next(batches)
        total = self._tf.reduce_sum(self._pulled(numbers))
        with self._tf.control_dependencies([total]):
            self._strategy.run(self._step, args=(numbers,))
        return total

    def _step(self, numbers: Any, scale: float = 1.0) -> None:
        tf, count = self._tf, len(self._parts)
        unique, inverse = tf.unique(numbers)
        given = self._grads if scale == 1.0 else scale * self._grads
        sums = tf.math.unsorted_segment_sum(given, inverse, tf.size(unique))
        ids, grads = [unique], [sums]
        if count > 1:
            # Parts are consecutive runs of rows, the first ones longer by one where uneven.
            starts = np.cumsum([0, *(int(part.shape[0]) for part in self._parts)])
            owners = tf.searchsorted(starts[1:], unique, side="right")
            local = unique - tf.gather(tf.constant(starts[:-1]), owners)
            ids = tf.dynamic_partition(local, owners, count)
            grads = tf.dynamic_partition(sums, owners, count)
        pairs = [
            (tf.IndexedSlices(g, i, tf.constant(part.shape.as_list(), tf.int64)), part)
            for g, i, part in zip(grads, ids, self._parts, strict=True)
        ]
        self._optimizer.apply_gradients(pairs)


if __name__ == "__main__":
    run(TensorflowPs)
