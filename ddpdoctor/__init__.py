"""ddpdoctor: a doctor for PyTorch DistributedDataParallel jobs.

This module imports nothing: it is also loaded inside training processes.
"""

__version__ = "0.1.0"
