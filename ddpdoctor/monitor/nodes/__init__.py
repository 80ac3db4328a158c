"""Several nodes: the monitor of rank 0's node sees all ranks, the others forward theirs to it."""
