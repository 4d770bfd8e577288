"""One attempt: prepare, launch, follow, clean up."""
