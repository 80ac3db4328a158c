"""What becomes of a watched training when the monitor, the machine or the job itself misbehaves."""
