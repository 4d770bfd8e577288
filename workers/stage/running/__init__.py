"""A stage that runs: forwards, backwards and all that follows a step."""
