#!/usr/bin/env python
"""Asks a role of this container how it is: `heterps-health PORT`, exit 0 when it serves.

A script file, because some engines split the words of a health command. It calls 127.0.0.1, which
is in every certificate that `heterps certs` makes; health needs no token.
"""

import sys

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from chassis.channels import connect

TIMEOUT_S = 4.0


def main(port: str) -> int:
    """Ask once."""
    with connect(f"127.0.0.1:{port}") as channel:
        try:
            reply = health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(), timeout=TIMEOUT_S
            )
        except grpc.RpcError as error:
            print(error.code().name, error.details())
            return 1
    print(health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status))
    return 0 if reply.status == health_pb2.HealthCheckResponse.SERVING else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
