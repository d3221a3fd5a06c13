"""Makes the processes of tests start faster: Python reads this file first where PYTHONPATH names its folder.

Most of them live for a second or two, and import torch in most of that. Meanwhile there is no garbage to
collect; later, and when the process ends, what torch imported is not searched again. Workers compile
nothing, export nothing, quantize nothing of torch's and compute nothing without data, so what torch imports
for that is empty in them: a third of their start. In other processes too, where a test sets QUICK_START.
"""

import gc
import importlib.machinery
import os
import sys
import types

LEFT_OUT = (
    "torch._custom_op",
    "torch._dynamo",
    "torch._export",
    "torch._functorch",
    "torch._higher_order_ops",
    "torch._inductor",
    "torch._meta_registrations",
    "torch._subclasses",
    "torch.ao",
    "torch.distributions",
    "torch.export",
    "torch.fx",
    "torch.masked",
    "torch.nested",
    "torch.nn.intrinsic",
    "torch.nn.qat",
    "torch.nn.quant",
    "torch.onnx",
    "torch.package",
    "torch.quantization",
    "torch.testing",
    "torch.utils._debug_mode",
    "torch.utils.data.datapipes",
    "torchgen",
)
QUICK = not {"PYPS_RUN", "QUICK_START"}.isdisjoint(os.environ)


class Empty(types.ModuleType):
    """Stands in for a module that is left out: its functions do nothing, and nothing is of its classes."""

    def disable(self, function, *_, **__):
        return function

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {}) if name[0].isupper() and not name.isupper() else Empty(name)

    def __call__(self, *_, **__):
        return self

    def __contains__(self, _):
        return False


class Finder:
    """Finds torch and what is left out of it; leaves all other modules to the finders after it."""

    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            spec = importlib.machinery.PathFinder.find_spec(name)
            if spec is not None:
                self.run, spec.loader.exec_module = spec.loader.exec_module, self.import_torch
            return spec
        if QUICK and name.startswith(LEFT_OUT):  # torchvision imports modules of torch._dynamo
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def import_torch(self, module):
        gc.disable()
        self.run(module)
        if QUICK and hasattr(module._C, "_set_generator_metaclass"):  # what is left out does this too
            module._C._set_generator_metaclass(module._opaque_base.OpaqueBaseMeta)
        gc.freeze()
        gc.enable()

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Finder())
