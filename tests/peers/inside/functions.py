"""Runs the ``main()`` of a module that is a test script, and notes what became of each function that tests something.

``torchrun functions.py MODULE``: the functions are those that begin with ``test_`` or end in ``_check`` or ``_test``.
"""

import functools
import importlib
import inspect
import json
import os
import sys


def note(name, outcome):
    """Write what became of a function on this rank."""
    with open(os.environ["PEERS_OUTCOMES"], "a") as file:
        file.write(json.dumps([name, os.environ.get("RANK", ""), outcome]) + "\n")


def noting(function, name):
    """Return a function that notes how another one ends."""

    @functools.wraps(function)
    def noted(*arguments, **options):
        try:
            result = function(*arguments, **options)
        except BaseException as error:
            note(name, f"failed: {type(error).__name__}")
            raise
        note(name, "passed")
        return result

    return noted


if __name__ == "__main__":
    module = importlib.import_module(sys.argv[1])
    for name, function in inspect.getmembers(module, inspect.isfunction):
        if function.__module__ == module.__name__ and (name.startswith("test_") or name.endswith(("_check", "_test"))):
            setattr(module, name, noting(function, f"{sys.argv[1].split('.')[-1]}.{name}"))
    del sys.argv[1]
    module.main()
