"""Ray's token of a benchmark. Without one, `ray.init()` leaves a token in the user's home; from then on
`ray start --head` asks for it, but `ray start --address` does not send it."""

from __future__ import annotations

import os
import secrets


def use_ray_token() -> None:
    """For the Ray of this process and of all that it starts; before ray is imported."""
    os.environ["RAY_AUTH_MODE"] = "token"
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
