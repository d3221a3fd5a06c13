"""Builds the C core (csrc) once, as pyps._native and as a library for others; all else is in pyproject.toml.

Where the core cannot run, or with PYPS_NO_CORE=1, the package has Python alone: no store, but all else.

pyps/_native.abi3.so                   the cffi extension
pyps/lib/libpyps.so.N, libpyps.a       the same objects; N is PYPS_ABI; libpyps.so leads the linker there
pyps/lib/pkgconfig, pyps/lib/cmake     how build systems find them
pyps/include/pyps.h
"""

import os
import platform
import re
import runpy
import shutil
import sys
from pathlib import Path

from setuptools import setup
from setuptools.command.build_ext import build_ext

MACHINES = ("x86_64", "amd64", "aarch64", "arm64")
CSRC = Path("csrc")
TEMPLATES = {
    "pyps.pc": "lib/pkgconfig",
    "pypsConfig.cmake": "lib/cmake/pyps",
    "pypsConfigVersion.cmake": "lib/cmake/pyps",
}

abi = re.search(r"#define PYPS_ABI\s+(\d+)", (CSRC / "pyps.h").read_text(encoding="utf-8"))
LIBRARY = f"libpyps.so.{abi[1]}"

# The store needs futexes, OFD locks and POSIX shared memory as Linux has them.
RUNS_HERE = sys.platform.startswith("linux") and platform.machine().lower() in MACHINES
HAS_CORE = RUNS_HERE and not os.environ.get("PYPS_NO_CORE")


class BuildCore(build_ext):
    """Compiles csrc/**/*.c, links the extension and the libraries from the objects."""

    def run(self):
        super().run()
        self.install_library(Path("pyps") if self.inplace else Path(self.build_lib, "pyps"))

    def build_extension(self, ext):
        self.core = self.compiler.compile(
            [str(path) for path in sorted(CSRC.rglob("*.c"))],
            output_dir=self.build_temp,
            include_dirs=[str(CSRC)],
            extra_postargs=ext.extra_compile_args,
            depends=ext.depends,
        )
        ext.extra_objects = [*ext.extra_objects, *self.core]
        super().build_extension(ext)

    def install_library(self, package):
        lib, include = package / "lib", package / "include"
        include.mkdir(parents=True, exist_ok=True)
        lib.mkdir(exist_ok=True)
        shutil.copyfile(CSRC / "pyps.h", include / "pyps.h")
        self.install_static(lib)
        script = self.fill("libpyps.map", Path(self.build_temp))
        self.compiler.link_shared_object(
            self.core,
            str(lib / LIBRARY),
            libraries=["m", "pthread"],
            extra_postargs=[f"-Wl,-soname,{LIBRARY}", f"-Wl,--version-script={script}", "-Wl,-z,defs"],
        )
        for earlier in {*lib.glob("libpyps.so.*")} - {lib / LIBRARY}:
            earlier.unlink()
        # A wheel holds no links: a linker script says where -lpyps leads.
        (lib / "libpyps.so").write_text(f"INPUT({LIBRARY})\n", encoding="utf-8")
        for name, folder in TEMPLATES.items():
            self.fill(name, package / folder)

    def fill(self, name, folder):
        """Write a template of csrc/packaging, filled in, to a folder; its path."""
        text = (CSRC / "packaging" / f"{name}.in").read_text(encoding="utf-8")
        filled = text.replace("@VERSION@", self.distribution.get_version()).replace("@ABI@", abi[1])
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(filled, encoding="utf-8")
        return folder / name

    def install_static(self, lib):
        """One object whose internal symbols are local: they cannot clash with those of a program."""
        whole = Path(self.build_temp, "libpyps.o")
        self.spawn([*self.compiler.compiler, "-r", "-nostdlib", "-o", str(whole), *self.core])
        self.spawn([os.environ.get("OBJCOPY", "objcopy"), "--localize-hidden", str(whole)])
        self.compiler.create_static_lib([str(whole)], "pyps", output_dir=str(lib))


CORE = {
    "cffi_modules": ["csrc/build_ffi.py:ffi"],
    "cmdclass": {"build_ext": BuildCore},
    "options": {"bdist_wheel": {"py_limited_api": "cp311"}},
}
PAGE = {
    "long_description": runpy.run_path(str(CSRC / "packaging" / "page.py"))["package_page"](),
    "long_description_content_type": "text/markdown",
}
setup(**PAGE, **(CORE if HAS_CORE else {}))
