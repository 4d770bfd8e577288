"""The files of a split: found, fetched, unpacked, and read as Arrow record batches."""
