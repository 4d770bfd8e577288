"""A TensorFlow cluster on loopback: one worker, which is the client, and parameter servers."""

import json
import os
import sys
from importlib import import_module
from typing import Any

from bench.ps.peers import children

_QUIET = {
    "TF_CPP_MIN_LOG_LEVEL": "2",
    "CUDA_VISIBLE_DEVICES": "",
    "TF_USE_LEGACY_KERAS": "1",  # TFRA and the sparse Adagrad kernels go with that Keras
}


def tensorflow(addons: bool) -> Any:
    """The module; with TFRA's operations registered where `addons`."""
    os.environ.update(_QUIET)
    module = import_module("tensorflow")
    if addons:
        import_module("tensorflow_recommenders_addons")
    return module


def start(shards: int, addons: bool) -> tuple[dict[str, list[str]], list[children.Child]]:
    """Addresses of a cluster whose servers are ready, and these."""
    cluster = {
        "ps": [f"127.0.0.1:{children.free_port()}" for _ in range(shards)],
        "worker": [f"127.0.0.1:{children.free_port()}"],
    }
    text = json.dumps(cluster)
    servers = [
        children.start("bench.ps.peers.tf_cluster", [text, str(i), "addons" if addons else ""])
        for i in range(shards)
    ]
    for server in servers:
        server.wait_ready()
    return cluster, servers


def device(shard: int) -> str:
    """The CPU of a server."""
    return f"/job:ps/replica:0/task:{shard}/device:CPU:0"


def serve(cluster: str, shard: int, addons: bool) -> None:
    """Be a parameter server."""
    tf = tensorflow(addons)
    spec = tf.train.ClusterSpec(json.loads(cluster))
    server = tf.distribute.Server(spec, job_name="ps", task_index=shard, protocol="grpc")
    children.serve(server.target)


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "addons")
