"""learning_rate, record and shaped of the folder above, for the scripts in this one, which are run by path.

    from benchmark_tools import record

The only place that extends sys.path for them.
"""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1]))

import learning_rate
import record
import shaped

__all__ = ["learning_rate", "record", "shaped"]
