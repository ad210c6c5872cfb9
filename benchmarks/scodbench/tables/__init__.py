"""Tables from rows, and nothing else."""
