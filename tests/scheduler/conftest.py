"""The tests of this folder share a device and a harness."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
