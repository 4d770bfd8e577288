"""What every process does alike: serve, call, secure, start and end, log, measure, trace."""
