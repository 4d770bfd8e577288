"""From a job file to a JobSpec with its code."""
