"""Between workers and to the device."""
