"""What a caller does: ParameterClient, one file a verb."""
