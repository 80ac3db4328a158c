"""What a live run has in its ranks: a stopwatch on the training thread, and a thread that writes down what it says."""
