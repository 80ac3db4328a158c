"""The command line that starts a job."""
