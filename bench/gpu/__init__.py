"""The ops on a GPU: built, tested, trained with and measured by one command."""
