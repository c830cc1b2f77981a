"""The choice of method "auto" without a profile: a Jacobi window where it is nearly free, else plain decoding."""

import dataclasses
from collections.abc import Mapping

from lantern.core.sampling import Sampling
from lantern.engines.pass_times import is_steady, pass_times
from lantern.methods.registry import METHODS, Method
from lantern.models.folder import Model

FLAT = 1.1  # most seconds of a pass over a window, as a multiple of those of a pass over one code


def quick_choice(model: Model, sampling: Sampling, *, batch: int = 1) -> Method:
    """Return the longest window that is nearly free, or plain decoding, for `batch` images at a time; with its reason.

    Reads T(n) of `engines.pass_times`, which takes about 50 ms the first time on a machine. Engines that would compile
    every window first decode plainly.
    """
    if model.engine.compiles_steps:
        return dataclasses.replace(METHODS["plain"], reason="a window would be compiled first")
    lines = sampling.rows * batch
    times, most = pass_times(model.engine, model.target, rows=lines), model.engine.most_nodes(lines)
    return choose({n: seconds for n, seconds in times.items() if most is None or n <= max(most, 2)})


def choose(times: Mapping[int, float]) -> Method:
    """Return the method for T(n) by number of codes n, with its reason.

    A window of n codes commits at least one code per pass, so it is at most T(n) / T(1) times as slow as plain
    decoding, whatever the model. The longest window whose factor is at most FLAT is chosen; plain decoding if the times
    are not steady.
    """
    if not is_steady(times):
        reason = "other programs took part of the time in which passes were measured"
        return dataclasses.replace(METHODS["plain"], reason=reason)
    windows = [n for n in times if n > 1]
    flat = [n for n in windows if times[n] <= FLAT * times[1]]
    shown = max(flat, default=min(windows, default=1))
    reason = (
        f"a pass over {shown} codes takes {times[shown] / times[1]:.2f} times a pass over one "
        f"({1e3 * times[1]:.1f} ms), and windows of up to {FLAT:g} times are chosen"
    )
    method = METHODS["gumbel-jacobi"].with_options(window=shown) if flat else METHODS["plain"]
    return dataclasses.replace(method, reason=reason)
