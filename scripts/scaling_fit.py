"""The law that scaling runs are fitted to: L(C) = E + A C^-alpha, with intervals from the bootstrap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

_GRID = 200  # values of E that are tried, and then as many around the best
_RESAMPLES = 400
_SMALLEST_GAP = 1e-3  # of the way from 0 to the lowest loss: E stays below it by this much at least


@dataclass(frozen=True)
class Law:
    """``loss(C) = e + a (C / scale)^-alpha``. ``scale`` is the geometric mean of the fitted C, where the loss is
    ``e + a``."""

    e: float
    a: float
    alpha: float
    scale: float

    def __call__(self, compute: np.ndarray) -> np.ndarray:
        return self.e + self.a * (np.asarray(compute) / self.scale) ** -self.alpha


@dataclass(frozen=True)
class Fit:
    """The best law, and those of the resamples (none with fewer than four points)."""

    law: Law
    resampled: tuple[Law, ...]

    def interval(self, name: str, share: float = 0.9) -> tuple[float, float]:
        """The middle ``share`` of the resamples' values of ``e``, ``a`` or ``alpha``; NaN without resamples."""
        values = [vars(law)[name] for law in self.resampled] or [np.nan]
        low, high = np.quantile(values, [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)

    def band(self, compute: np.ndarray, share: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """As :meth:`interval`, of the loss at each of ``compute``."""
        losses = np.array([law(compute) for law in self.resampled])
        low, high = np.quantile(losses, [(1 - share) / 2, (1 + share) / 2], axis=0)
        return low, high


def fit_law(compute: Sequence[float], loss: Sequence[float], seed: int = 0) -> Fit:
    """Weighted least squares of log(loss - E) against log(compute) for each E of a grid; the E whose law has the least
    error in the loss itself is taken. Residuals are resampled for the intervals.

    Raises:
        ValueError: fewer than three different values of ``compute``, or a loss that does not fall.
    """
    x, y = np.asarray(compute, dtype=float), np.asarray(loss, dtype=float)
    if len(np.unique(x)) < 3:
        raise ValueError(f"a law of three numbers needs three different values of compute, found {len(np.unique(x))}")
    law = _least_squares(x, y)
    if law is None:
        raise ValueError("the loss does not fall with compute: no power law fits it")
    residuals = y - law(x)
    resampled = []
    if len(x) >= 4:
        # Three parameters take up three degrees of freedom, so residuals are smaller than the noise. How much noise the
        # few that are left stand for is itself uncertain: the quotient by chi-square gives Student's t its tails.
        freedom = len(x) - 3
        generator = np.random.default_rng(seed)
        for _ in range(_RESAMPLES):
            noise = generator.choice(residuals, len(x)) * np.sqrt(len(x) / generator.chisquare(freedom))
            again = _least_squares(x, law(x) + noise)
            if again is not None:
                resampled.append(again)
    return Fit(law, tuple(resampled))


def _least_squares(x: np.ndarray, y: np.ndarray) -> Law | None:
    """The best law, or ``None`` where no E gives one that falls."""
    scale = float(np.exp(np.log(x).mean()))
    logs = np.log(x / scale)
    lowest = y.min() * (1 - _SMALLEST_GAP)
    best, step = 0.0, lowest / _GRID
    law = None
    for _ in range(2):  # the whole range, then around the best
        grid = np.clip(best + step * np.linspace(-1, 1, _GRID), 0, lowest) if law else np.linspace(0, lowest, _GRID)
        errors, laws = _laws(logs, y, grid, scale)
        if not np.isfinite(errors).any():
            return law
        best = float(grid[errors.argmin()])
        law = laws(int(errors.argmin()))
    return law


def _laws(logs: np.ndarray, y: np.ndarray, grid: np.ndarray, scale: float) -> tuple[np.ndarray, Callable[[int], Law]]:
    """(squared error of each E's law, a function that gives the law of a place in the grid)."""
    targets = np.log(y[None, :] - grid[:, None])
    # A small gap to E is known less exactly in the logarithm: an error of y counts 1 / (y - E) there.
    weights = (y[None, :] - grid[:, None]) ** 2
    total = weights.sum(1)
    mean_x, mean_t = (weights * logs).sum(1) / total, (weights * targets).sum(1) / total
    centred = logs[None, :] - mean_x[:, None]
    slope = (weights * centred * targets).sum(1) / (weights * centred**2).sum(1)
    intercept = mean_t - slope * mean_x
    predicted = grid[:, None] + np.exp(intercept[:, None] + slope[:, None] * logs)
    errors = np.where(slope < 0, ((predicted - y) ** 2).sum(1), np.inf)
    return errors, lambda place: Law(float(grid[place]), float(np.exp(intercept[place])), float(-slope[place]), scale)
