"""Runs PyTorch's own ``DistributedTest`` on two ranks, forked for each test: ``torch_forked.py TEST …``; without: all.

The variables of the environment are those of PyTorch's ``run_test.py``. What became of each test is a line of the file
that ``PEERS_OUTCOMES`` names.
"""

import json
import os
import sys
import tempfile
import unittest

folder = tempfile.mkdtemp(dir=os.environ.get("PEERS_SCRATCH"))
os.environ.update(BACKEND="gloo", WORLD_SIZE="2", TEMP_DIR=folder, INIT_METHOD=f"file://{folder}/shared_init_file")

import torch  # noqa: E402
from torch.testing._internal.distributed.distributed_test import DistributedTest, TestDistBackend  # noqa: E402


class TestDistBackendWithFork(TestDistBackend, DistributedTest._DistTestBase):
    """As PyTorch's ``TestDistBackendWithSpawn``, with ranks that need not import torch anew."""

    def setUp(self):
        super().setUp()
        self._start_processes(torch.multiprocessing.get_context("fork").Process)


class Outcomes(unittest.TextTestResult):
    """Writes each outcome at once."""

    def _write(self, test, outcome):
        with open(os.environ["PEERS_OUTCOMES"], "a") as file:
            file.write(json.dumps([test._testMethodName, "", outcome]) + "\n")

    def addSuccess(self, test):
        self._write(test, "passed")
        super().addSuccess(test)

    def addSkip(self, test, reason):
        self._write(test, "skipped")
        super().addSkip(test, reason)

    def addFailure(self, test, error):
        self._write(test, f"failed: {error[0].__name__}")
        super().addFailure(test, error)

    def addError(self, test, error):
        self._write(test, f"failed: {error[0].__name__}")
        super().addError(test, error)


if __name__ == "__main__":
    names = sys.argv[1:] or unittest.TestLoader().getTestCaseNames(TestDistBackendWithFork)
    tests = unittest.TestSuite(TestDistBackendWithFork(name) for name in names)
    sys.exit(not unittest.TextTestRunner(resultclass=Outcomes, verbosity=2).run(tests).wasSuccessful())
