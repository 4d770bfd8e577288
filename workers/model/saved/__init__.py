"""Models and cuts of jobs on disk, opened again, exported and predicting."""
