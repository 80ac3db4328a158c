"""CUDA and NCCL, served from the CPU and gloo: the CUDA stand-in.

It stands for the machine ("there are two GPUs, the current one is 1") and accepts what a script requests of it, and it
never lies about a tensor: ``is_cuda`` is False and ``device`` is ``cpu``. What it cannot serve raises ``StandInGap``
with the name of it, so that the rehearsal ends inconclusive instead of wrong.
"""
