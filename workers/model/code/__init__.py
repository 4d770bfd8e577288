"""A job's own code, and from it a module that is the same on every process of the job."""
