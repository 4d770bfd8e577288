"""A cluster that tests of jobs that go on share, and what their job comes to undisturbed."""

from tests.scheduler.runs.survivors import service, unfailed

__all__ = ["service", "unfailed"]
