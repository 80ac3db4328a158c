"""What PyTorch's tests use of the package of this name, where it is not installed."""

import unittest


class TestCase(unittest.TestCase):
    """Compares with texts that stand in the test."""

    def assertExpectedInline(self, actual, expect, skip=0):
        """Compare."""
        self.assertEqual(expect.strip(), actual.strip())


def assert_expected_inline(*arguments, **options):
    """Compare in a function."""
    TestCase().assertExpectedInline(*arguments, **options)
