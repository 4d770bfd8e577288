"""The C++ planner as Python sees it: `from scheduler.engine import _planner`."""
