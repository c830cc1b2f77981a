"""The choice of method "auto" without a profile: a Jacobi window, or plain decoding.

T(n), the time of a pass over n codes, is measured. Where the model's folder records how many codes a window commits per
pass, the window with the most codes per second is chosen; else the longest one that is nearly free.
"""

import dataclasses
from collections.abc import Mapping

from lantern.core.sampling import Sampling
from lantern.engines.pass_times import is_steady, pass_times
from lantern.methods.registry import METHODS, Method
from lantern.models.folder import Model

FLAT = 1.1  # most seconds of a pass over a window, as a multiple of those of a pass over one code
GAIN = 1.1  # least predicted speedup over plain decoding at which a window is chosen; less is noise


def quick_choice(model: Model, sampling: Sampling, *, batch: int = 1) -> Method:
    """Return the fastest window by T(n), or plain decoding, for `batch` images at a time; with its reason.

    Reads T(n) of `engines.pass_times`, which takes about 50 ms the first time on a machine. Engines that would compile
    every window first decode plainly.
    """
    if model.engine.compiles_steps:
        return dataclasses.replace(METHODS["plain"], reason="a window would be compiled first")
    lines = sampling.rows * batch
    times, most = pass_times(model.engine, model.target, rows=lines), model.engine.most_nodes(lines)
    allowed = {n: seconds for n, seconds in times.items() if most is None or n <= max(most, 2)}
    return choose(allowed, model.codes_per_pass, can_shrink=model.engine.has_free_rows)


def choose(times: Mapping[int, float], codes: Mapping[int, float] | None = None, *, can_shrink: bool = True) -> Method:
    """Return the method for T(n) by number of codes n, with its reason; plain decoding if the times are not steady.

    `codes` are the codes per pass that windows of n codes commit. The window with the most codes per second is chosen
    if it is GAIN times as fast as plain decoding. Without `codes`, a window of n codes commits at least one code per
    pass, so it is at most T(n) / T(1) times as slow as plain decoding, whatever the model: the longest window whose
    factor is at most FLAT is chosen. A window by `codes` that is not as good as free gets the setting `least`, if the
    engine's passes can shrink.
    """
    if not is_steady(times):
        reason = "other programs took part of the time in which passes were measured"
        return dataclasses.replace(METHODS["plain"], reason=reason)
    windows = [n for n in times if n > 1]
    if known := [n for n in windows if n in (codes or {})]:
        return _fastest(times, {n: codes[n] for n in known if codes}, can_shrink)
    flat = [n for n in windows if times[n] <= FLAT * times[1]]
    shown = max(flat, default=min(windows, default=1))
    reason = (
        f"a pass over {shown} codes takes {times[shown] / times[1]:.2f} times a pass over one "
        f"({1e3 * times[1]:.1f} ms), and windows of up to {FLAT:g} times are chosen"
    )
    method = METHODS["gumbel-jacobi"].with_options(window=shown) if flat else METHODS["plain"]
    return dataclasses.replace(method, reason=reason)


def _fastest(times: Mapping[int, float], codes: Mapping[int, float], can_shrink: bool) -> Method:
    """Return the window with the most codes per second, or plain decoding where it is faster or nearly as fast."""
    best = max(codes, key=lambda n: codes[n] / times[n])
    gain = codes[best] * times[1] / times[best]
    reason = (
        f"a pass over {best} codes takes {times[best] / times[1]:.2f} times a pass over one ({1e3 * times[1]:.1f} ms) "
        f"and commits {codes[best]:.2f} codes"
    )
    if gain < GAIN:
        return dataclasses.replace(METHODS["plain"], reason=reason)
    # The picture at hand may commit fewer codes than those that were recorded.
    least = GAIN * times[best] / times[1]
    options = {"window": best} | ({"least": round(least, 2)} if can_shrink and least > GAIN * FLAT else {})
    return dataclasses.replace(METHODS["gumbel-jacobi"].with_options(**options), reason=reason)
