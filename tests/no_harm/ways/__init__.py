"""The rows of the table, by who does it."""

from tests.no_harm.ways.children import CHILDREN
from tests.no_harm.ways.habits import HABITS
from tests.no_harm.ways.libraries import LIBRARIES
from tests.no_harm.ways.places import PLACE_ROWS
from tests.no_harm.ways.programs import PROGRAMS
from tests.no_harm.ways.python import PYTHON

WAYS = (*PYTHON, *LIBRARIES, *PROGRAMS, *CHILDREN, *PLACE_ROWS, *HABITS)

__all__ = ["WAYS"]
