"""The process `python -m scheduler.service` and its gRPC services."""
