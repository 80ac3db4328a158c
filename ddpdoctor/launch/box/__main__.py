"""The program ``launch.box.start`` runs, by its path: Python is started without the site and its own directories."""

import os
import sys

sys.path.insert(0, os.path.abspath(os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "..")))

from ddpdoctor.launch.box.inside import main

main(sys.argv[1])
