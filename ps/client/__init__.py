"""ParameterClient: one file a verb."""
