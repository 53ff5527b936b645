"""What several benches share. Importing it makes `kvweave` the tree that the bench stands in."""

import sys

from common.files import REPO

sys.path.insert(0, str(REPO / "src"))
