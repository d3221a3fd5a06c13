"""cffi API-mode build of pyps._native: the cdef is the marked part of pyps.h, so the two cannot drift."""

import re
from pathlib import Path

from cffi import FFI

CSRC = Path("csrc")  # setuptools runs this from the repository root

CALLED_BACK = """
extern "Python" int pyps_python_start(const pyps_policy_context *context, uint64_t *shared_state);
extern "Python" int pyps_python_push(const pyps_policy_context *context, uint64_t *shared_state,
                                     float *scale);
extern "Python" int pyps_python_interrupted(void);
extern "Python" int pyps_python_visit(void *context, uint64_t first, const float *values, uint64_t count);
extern "Python" int pyps_python_arrived(void *context, uint64_t first, uint64_t count);
"""


def cdef() -> str:
    """The part of pyps.h between the two cffi markers, without preprocessor lines and PYPS_API."""
    text = (CSRC / "pyps.h").read_text(encoding="utf-8")
    marked = re.search(r"/\* cffi: begin \*/(.*)/\* cffi: end \*/", text, re.S)
    if marked is None:
        raise SystemExit("csrc/pyps.h: the cffi markers are missing")
    lines = [line for line in marked.group(1).splitlines() if not line.lstrip().startswith("#")]
    return "\n".join(lines).replace("PYPS_API ", "") + CALLED_BACK


FLAGS = "-std=c11 -O3 -fvisibility=hidden -ffp-contract=off -fno-math-errno -Wall -Wextra -D_GNU_SOURCE"

ffi = FFI()
ffi.cdef(cdef())
ffi.set_source(
    "pyps._native",
    '#include "pyps.h"',
    depends=[str(path) for path in sorted(CSRC.rglob("*.h"))],
    include_dirs=[str(CSRC)],
    extra_compile_args=FLAGS.split(),
    libraries=["m", "pthread"],
    py_limited_api=True,
)
