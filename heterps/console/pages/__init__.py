"""The console's pages, a file each."""
