"""Makes workers start faster in tests: Python reads this file first where PYTHONPATH names its folder.

A torch optimizer imports torch._dynamo only to keep torch.compile out of itself. That takes longer than
importing torch, and these workers compile nothing: an empty module takes its place.
"""

import importlib.machinery
import os
import sys
import types


class NothingCompiled(types.ModuleType):
    """Stands in for torch._dynamo."""

    def disable(self, function, *_, **__):
        return function

    def graph_break(self):
        pass


class Finder:
    """Finds it, and leaves all other modules to the finders after it."""

    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name == "torch._dynamo" else None

    def create_module(self, spec):
        return NothingCompiled(spec.name)

    def exec_module(self, module):
        pass


if "PYPS_RANK" in os.environ:
    sys.meta_path.insert(0, Finder())
