"""What is recorded about objects of torch, the same in a rehearsal and in a live run."""
