"""A model of a training step, fitted to a recorded run, and what a change to the job would make of it. Pure."""
