"""Learning rates as pure functions of the number of the update; needs no torch.

A schedule returns the factor by which the peak rate is multiplied. The updates of a run are
numbered 0 to `total - 1`; the last one really uses the floor. Nothing is stored: a resumed run
asks for the same number and gets the same factor.
"""

import math
from collections.abc import Callable
from fractions import Fraction

from keepstep.config.schema import ScheduleConfig

Schedule = Callable[[int], float]
# The share of the way from the end of the warm-up to the last update. Exact, because a rounded
# one can fall just short of the start of a cycle or of a decay, and so be a whole cycle off.
Progress = Fraction | float


def build_schedule(config: ScheduleConfig, total_updates: int) -> Schedule:
    """Return the factor of each update; beyond the last one it stays what it was there.

    The warm-up rises linearly and reaches the peak with its last update; it never uses 0.
    """
    shape = _shape(config, total_updates)
    warmup = config.warmup_steps
    last = max(total_updates - 1, warmup)

    def factor(update: int) -> float:
        if update < warmup:
            return (update + 1) / warmup
        if update >= last:
            return shape(Fraction(1))
        return shape(Fraction(update - warmup, last - warmup))

    return factor


def _shape(config: ScheduleConfig, total_updates: int) -> Callable[[Progress], float]:
    """Return the factor as a function of the progress after the warm-up, 0 to 1."""
    floor = config.floor
    match config.name:
        case "constant":
            return lambda _: 1.0
        case "linear":
            return lambda progress: _decay("linear", progress, floor)
        case "cosine":
            return lambda progress: _decay("cosine", progress, floor)
        case "rex":
            return lambda progress: floor + (1 - floor) * rex(progress)
        case "cosine_restarts":
            return lambda progress: damped_restarts(
                progress, cycles=config.cycles, damping=config.damping, floor=floor
            )
        case "wsd":
            span = max(total_updates - 1 - config.warmup_steps, 1)
            # The decay takes `decay_steps` updates, of which the last is the last of the run. A
            # decay that begins with the first update after the warm-up has its start in the last
            # of the warm-up, which is at the peak: then this is negative.
            stable = 1 - Fraction(config.decay_steps, span)

            def wsd(progress: Progress) -> float:
                if progress <= stable:
                    return 1.0
                return _decay(config.decay, (progress - stable) / (1 - stable), floor)

            return wsd


def rex(progress: Progress) -> float:
    """Return (1 - p) / (1/2 + (1 - p) / 2), which is 1 at the start and 0 at the end.

    Chen, Wolfe and Kyrillidis (2021), "REX: Revisiting Budgeted Training with an Improved
    Schedule", section 3.
    """
    return float((1 - progress) / (0.5 + 0.5 * (1 - progress)))


def damped_restarts(progress: Progress, *, cycles: int, damping: float, floor: float) -> float:
    """Return the factor of cosine cycles that are damped: `floor` exactly at progress 1.

    m(p) = r + (d^c - r) (1 + cos(pi f)) / 2 with c = floor(n p) and f = n p - c. At p = 1 the last
    cycle ends (f = 1); it is not the start of another one. A config whose damped peaks would lie
    below the floor is refused when it is loaded.
    """
    cycle = min(math.floor(cycles * progress), cycles - 1)
    within = cycles * progress - cycle
    peak = damping**cycle
    return floor + (peak - floor) * (1 + math.cos(math.pi * within)) / 2


def _decay(shape: str, progress: Progress, floor: float) -> float:
    """Return the factor on the way from 1 to the floor, which progress 1 gives exactly."""
    match shape:
        case "linear":
            height = float(1 - progress)
        case "cosine":
            height = (1 + math.cos(math.pi * progress)) / 2
        case "sqrt":
            height = 1 - math.sqrt(progress)
        case _:
            raise ValueError(f"there is no decay of the shape {shape!r}")
    return floor + (1 - floor) * height
