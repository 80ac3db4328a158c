"""Lives inside the user's processes: the standard library and the torch that is already there, nothing else."""
