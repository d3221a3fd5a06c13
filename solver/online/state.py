"""The state of a device as messages: between ranks, and for checkpoints."""

from __future__ import annotations

import msgspec

from pyps.solver.costs import Cost, Line, Table
from pyps.solver.online.device import BalancedDevice, Bounds, DeviceReading, Estimate
from pyps.solver.online.refit import NOISE, Timed


class CostMessage(msgspec.Struct, frozen=True):
    """A cost as a message: the three numbers of a line, or the points of a table."""

    line: tuple[float, float, float] | None = None
    table: list[tuple[int, float]] | None = None

    @staticmethod
    def of(cost: Cost) -> CostMessage:
        """The message of a cost."""
        if isinstance(cost, Table):
            return CostMessage(table=list(cost.points))
        return CostMessage(line=(cost.fixed_seconds, cost.per_sample_seconds, cost.floor_seconds))

    def cost(self) -> Cost:
        """The cost itself."""
        return Line(*self.line) if self.line else Table(tuple(self.table or ()))


class ReadingMessage(msgspec.Struct, frozen=True):
    """A Reading as a message."""

    batch: int
    seconds: float | None
    cost: CostMessage
    proportional: CostMessage
    level: float
    error: float
    unsure: bool
    drifts: bool
    bounds: Bounds
    changing: bool

    @staticmethod
    def of(reading: DeviceReading) -> ReadingMessage:
        """The message of a reading."""
        e = reading.estimate
        return ReadingMessage(
            batch=reading.batch,
            seconds=reading.seconds,
            cost=CostMessage.of(e.cost),
            proportional=CostMessage.of(e.proportional),
            level=e.level,
            error=e.error,
            unsure=e.unsure,
            drifts=e.drifts,
            bounds=reading.bounds,
            changing=reading.changing,
        )

    def reading(self) -> DeviceReading:
        """The reading itself."""
        costs = self.cost.cost(), self.proportional.cost()
        estimate = Estimate(*costs, self.level, self.error, self.unsure, self.drifts)
        return DeviceReading(self.batch, self.seconds, estimate, self.bounds, self.changing)


class DeviceState(msgspec.Struct, frozen=True, kw_only=True):
    """Hold what is known of a Device.

    known: seconds by batch, over how many steps and with which scatter `timed` says; `scatter` is the latest.
    slopes: bounds of the slope, since the device has changed; first, first_slope: its cost and slope before
    that. drift: of each rate the odds, the place and the variance; slow: slow steps that lasted and that
    passed.
    """

    prior: CostMessage
    known: list[tuple[int, float]]
    level: float
    timed: list[tuple[float, float]] = []
    slopes: tuple[float, float] | None = None
    first: CostMessage | None = None
    first_slope: float = 1.0
    profiled: bool = True
    scatter: float = NOISE
    scattered: int = 0
    drift: tuple[list[float], list[float], list[float]] | None = None
    slow: tuple[int, int] = (0, 0)

    @staticmethod
    def of(device: BalancedDevice) -> DeviceState:
        """All that is known of a device, but steps that were not taken in."""
        online = device.online
        return DeviceState(
            prior=CostMessage.of(online.prior),
            known=[(batch, timed.seconds) for batch, timed in online.known.items()],
            timed=[(timed.steps, timed.scatter) for timed in online.known.values()],
            slopes=online.slopes,
            first=CostMessage.of(online.first) if online.first is not None else None,
            first_slope=online.first_slope,
            profiled=online.profiled,
            scatter=online.scatter,
            scattered=online.scattered,
            drift=(online.drift.odds, online.drift.at, online.drift.variances),
            slow=(online.lasted, online.passed),
            level=online.level,
        )

    def restore(self, device: BalancedDevice) -> None:
        """Give a device that knowledge."""
        online, timed = device.online, [*self.timed, *[(1, NOISE)] * (len(self.known) - len(self.timed))]
        online.prior, online.profiled = self.prior.cost(), self.profiled
        online.known = {b: Timed(s, *more) for (b, s), more in zip(self.known, timed, strict=True)}
        online.slopes, online.level, online.scatter = self.slopes, self.level, self.scatter
        online.first_slope = self.first_slope
        online.scattered, (online.lasted, online.passed) = self.scattered, self.slow
        if self.drift is not None:
            online.drift.odds, online.drift.at, online.drift.variances = map(list, self.drift)
        online.first = self.first.cost() if self.first is not None else None
