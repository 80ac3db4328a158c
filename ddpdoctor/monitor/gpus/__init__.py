"""GPUs as NVML shows them."""
