"""The live run in its ranks: a stopwatch on the training thread, and a thread that writes its figures."""
