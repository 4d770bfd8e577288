"""All planning methods behind one interface."""
