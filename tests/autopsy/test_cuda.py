"""Every error of the CUDA runtime is told by its own words, whoever reports it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ddpdoctor.autopsy.dead_job import AutopsyRequest, autopsy
from tests.autopsy.catalogue import printed

ERRORS = [line.partition(" ")[::2] for line in printed("cuda.txt")[0]]
CPP = """\
terminate called after throwing an instance of 'c10::Error'
  what():  CUDA error: {words}
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

Exception raised from c10_cuda_check_implementation at ../c10/cuda/CUDAException.cpp:43 (most recent call first):
frame #0: c10::Error::Error(c10::SourceLocation, std::string) + 0x96 (0x7f in libc10.so)
"""
PYTHON = """\
[rank3]: Traceback (most recent call last):
[rank3]:   File "/w/train.py", line 61, in <module>
[rank3]:     loss.backward()
[rank3]: RuntimeError: CUDA error: {words}
[rank3]: CUDA kernel errors might be asynchronously reported at some other API call.
"""
NCCL = "gpu07:4123:4201 [2] include/alloc.h:185 NCCL WARN Cuda failure {code} '{words}'\n"
OF_THE_MACHINE = {"uncorrectable ECC error encountered", "uncorrectable NVLink error detected during the execution"}
"""Faults of a GPU or of the links between GPUs: no one shall look for them in the script."""


@pytest.mark.parametrize("form", [CPP, PYTHON, NCCL], ids=["c++", "python", "nccl"])
def test_each_error_of_the_runtime_has_a_cause_with_its_words(form: str, tmp_path: Path) -> None:
    assert len(ERRORS) == 132
    log, unsaid, gpu_faults = tmp_path / "job.log", [], set()
    for code, named in ERRORS:
        words = named.partition(": ")[2]
        log.write_text(form.format(code=code, words=words))
        cause = next((one for one in autopsy(AutopsyRequest(paths=(str(log),))).findings if one.role == "cause"), None)
        told = "" if cause is None else " ".join((cause.title, *(fact.text for fact in cause.evidence)))
        if words not in told:
            unsaid.append((code, named, told))
        if cause is not None and cause.code == "DDP704":
            gpu_faults.add(words)
    assert unsaid == []
    assert gpu_faults >= OF_THE_MACHINE
