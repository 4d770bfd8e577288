"""What kills cost a running job, and whether anything of them is in the result."""
