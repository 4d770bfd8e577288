"""The process `python -m ps.server`: its gRPC methods, clocks, metrics, maintenance."""
