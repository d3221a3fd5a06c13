"""`python -m pyps.formats plan` prints the JSON schema of a plan; so for the other formats."""

from __future__ import annotations

import sys

from pyps.errors import InputError
from pyps.formats import encode, schema

if __name__ == "__main__":
    try:
        sys.stdout.write(encode(schema(*sys.argv[1:2] or [""])).decode())
    except InputError as error:
        sys.exit(f"pyps.formats: {error}")
