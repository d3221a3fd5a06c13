"""PieceGradient: this rank's piece of a gradient, whose norms are those of the whole.

torch.nn.utils.clip_grad_norm_ asks each parameter's gradient for its norm, and a GradScaler asks whether
gradients are finite. Of a piece, a rank would answer for itself, and ranks would scale or skip apart. So a
piece asks all ranks: once for all pieces, until they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist

from pyps.errors import InputError

NORMS = {
    torch.linalg.vector_norm,
    torch.linalg.norm,
    torch.norm,
    torch.Tensor.norm,
}
SAME_PIECE = {torch.Tensor.detach, torch.Tensor.data.__get__}  # type: ignore[attr-defined]
FINITE = torch._amp_foreach_non_finite_check_and_unscale_


class PieceGradient(torch.Tensor):
    """A piece of a gradient, [elements of the piece].

    Its norm, and that of its data, is the whole gradient's: all ranks call it. All else is of the piece.
    """

    among: PieceGradients
    number: int  # its place there

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> Any:
        named = named or {}
        with torch._C.DisableTorchFunctionSubclass():
            if function in NORMS and isinstance(args[0], cls):
                return args[0].among.norm(args[0], *_order(args[1:], named))
            if function is torch._foreach_norm and all(isinstance(one, cls) for one in args[0]):
                return [one.among.norm(one, *_order(args[1:], named)) for one in args[0]]
            found = function(*args, **named)
            if function is FINITE:
                for one in {id(g.among): g.among for g in args[0] if isinstance(g, cls)}.values():
                    dist.all_reduce(args[1], dist.ReduceOp.MAX, group=one.group)
        if function in SAME_PIECE:
            found = found.as_subclass(cls)
            found.among, found.number = args[0].among, args[0].number
        return found


def _order(positional: tuple[Any, ...], named: dict[str, Any]) -> tuple[float]:
    """Return the order of a norm. Raises InputError for one along a dimension, which a piece has not."""
    given = dict(zip(("ord", "dim"), positional, strict=False)) | named
    order = given.pop("ord", given.pop("p", None))
    found = 2.0 if order is None or order == "fro" else float(order)
    if any(value is not None and value is not False for value in given.values()) or found <= 0:
        raise InputError("norm", "of a sharded gradient", str(given or found), "an order above 0 and no dim")
    return (found,)


class PieceGradients:
    """All gradients of a backward pass that this rank has pieces of, in an order that all ranks share."""

    def __init__(self, pieces: Sequence[torch.nn.Parameter], group: dist.ProcessGroup) -> None:
        self.group = group
        self._gradients: list[ref[PieceGradient]] = []
        self._norms: dict[float, tuple[list[int], torch.Tensor]] = {}
        for piece in pieces:
            gradient: Any = piece.grad
            if not isinstance(gradient, PieceGradient):
                gradient = gradient.as_subclass(PieceGradient)
                piece.grad = gradient
            gradient.among, gradient.number = self, len(self._gradients)
            self._gradients.append(ref(piece.grad))  # type: ignore[arg-type]

    def norm(self, gradient: PieceGradient, order: float) -> torch.Tensor:
        """Return the norm of the whole gradient; the first call after a change computes all."""
        number = gradient.number
        versions, norms = self._norms.get(order, ([], gradient))
        if not versions or versions[number] != gradient._version:
            versions, norms = self._norms[order] = self._computed(order, gradient.device)
        return norms[number].to(gradient.device, gradient.dtype)

    def _computed(self, order: float, device: torch.device) -> tuple[list[int], torch.Tensor]:
        """The gradients' versions, and the norms, float64 [gradients]."""
        alive = [one() for one in self._gradients]
        versions = [-1 if one is None else one._version for one in alive]
        found = torch.zeros(len(alive), dtype=torch.float64, device=device)
        for k, one in enumerate(alive):
            if one is not None and one.numel():
                found[k] = torch.linalg.vector_norm(one, order, dtype=torch.float64)
        if order == inf:
            dist.all_reduce(found, dist.ReduceOp.MAX, group=self.group)
        else:
            found.pow_(order)
            dist.all_reduce(found, group=self.group)
            found.pow_(1 / order)
        return versions, found
