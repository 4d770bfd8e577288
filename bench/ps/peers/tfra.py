"""TFRA: TensorFlow Recommenders Addons' cuckoo hash tables on TensorFlow servers, any 64-bit key.

The client finds distinct keys (`tf.unique`) and sums gradients; the table's `lookup` and `upsert`
and the arithmetic of exact Adagrad run on the server, in one compiled function, so that keys and
gradients alone travel. That is less than TFRA's own optimizer wrapper sends, which computes in the
worker and moves rows and accumulators both ways. Weights and accumulators are two tables, as the
wrapper keeps them. Leaves out Keras layers, and exactly-once, which it does not have.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from typing import Any

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


@dataclass(slots=True)
class Prepared:
    """A batch as tensors."""

    keys: Any
    grads: Any


class Tfra(Peer):
    """One client; shard s holds the keys with key % shards == s."""

    def start(self) -> Sequence[int]:
        tf = self._tf = tf_cluster.tensorflow(addons=True)
        cluster, self._servers = tf_cluster.start(self.setting.shards, addons=True)
        spec = tf.train.ClusterSpec(cluster)
        tf.config.experimental_connect_to_cluster(spec, job_name="worker", task_index=0)
        self._weights = [self._table("weights", s, 0.0) for s in range(self.setting.shards)]
        self._squares = [
            self._table("squares", s, INITIAL_ACCUMULATOR) for s in range(self.setting.shards)
        ]
        keys = tf.TensorSpec([None], tf.int64)
        grads = tf.TensorSpec([None, self.setting.dim], tf.float32)
        self._pull = tf.function(self._pulled, input_signature=[keys])
        self._push = tf.function(self._pushed, input_signature=[keys, grads])
        return [server.pid for server in self._servers]

    def versions(self) -> dict[str, str]:
        names = ("tensorflow", "tensorflow-recommenders-addons")
        return {name: version(name) for name in names}

    def prepare(self, batch: Batch) -> Prepared:
        return Prepared(self._tf.constant(batch.keys), self._tf.constant(batch.grads))

    def pull(self, batch: Prepared, mode: str) -> Floats:
        rows: Floats = self._pull(batch.keys).numpy()  # waits; copies nothing on a CPU
        return rows

    def push(self, batch: Prepared, mode: str) -> None:
        self._push(batch.keys, batch.grads).numpy()

    def read(self, batch: Any) -> Floats:
        return np.asarray(self.pull(batch, ""))

    def close(self) -> None:
        for server in self._servers:
            server.stop()

    def _table(self, name: str, shard: int, first: float) -> Any:
        dynamic: Any = import_module("tensorflow_recommenders_addons.dynamic_embedding")
        return dynamic.get_variable(
            f"{name}{shard}",
            key_dtype=self._tf.int64,
            value_dtype=self._tf.float32,
            dim=self.setting.dim,
            initializer=first,
            devices=[tf_cluster.device(shard)],
        )

    def _pulled(self, keys: Any) -> Any:
        tf = self._tf
        unique, inverse = tf.unique(keys)
        positions, parts = self._split(unique)
        rows = []
        for shard, part in enumerate(parts):
            with tf.device(tf_cluster.device(shard)):
                rows.append(self._weights[shard].lookup(part))
        whole = rows[0] if len(rows) == 1 else tf.dynamic_stitch(positions, rows)
        return tf.gather(whole, inverse)

    def _pushed(self, keys: Any, grads: Any) -> Any:
        tf = self._tf
        unique, inverse = tf.unique(keys)
        sums = tf.math.unsorted_segment_sum(grads, inverse, tf.size(unique))
        positions, parts = self._split(unique)
        done = []
        for shard, part in enumerate(parts):
            mine = sums if len(parts) == 1 else tf.gather(sums, positions[shard])
            with tf.device(tf_cluster.device(shard)):
                weights, squares = self._weights[shard], self._squares[shard]
                new = squares.lookup(part) + mine * mine
                step = LEARNING_RATE * mine / (tf.sqrt(new) + EPSILON)
                done.append(weights.upsert(part, weights.lookup(part) - step))
                done.append(squares.upsert(part, new))
        with tf.control_dependencies(done):
            return tf.constant(0)

    def _split(self, unique: Any) -> tuple[list[Any], list[Any]]:
        tf, shards = self._tf, self.setting.shards
        if shards == 1:
            return [], [unique]
        owners = tf.cast(tf.math.floormod(unique, shards), tf.int32)
        positions = tf.dynamic_partition(tf.range(tf.size(unique)), owners, shards)
        return positions, tf.dynamic_partition(unique, owners, shards)


if __name__ == "__main__":
    run(Tfra)
