"""Calls the functions of the page of `lantern demo` as Gradio does: `python -m tests.generation.demo_page MODEL`."""

import sys
from dataclasses import replace

import gradio
import numpy as np

from lantern.generation import demo
from lantern.models.folder import load_model

demo.LONGEST = 0.1
sides = demo.SideBySide(load_model(sys.argv[1], device="cpu", engine="eager"))
functions = {one.name: one for one in demo.build_page(sides).fns.values()}
function = functions["fill"]
assert function.fn is not None and function.concurrency_limit == 1
outputs = list(function.fn("a red apple", "eagle1", 3.0, 5, []))
plain, other, numbers, accepted, gallery, past, decoded, slider = outputs[-1]
assert "data:image/webp" in plain and "tokens per step" in other and "tokens per step" in numbers
assert accepted[0].size and functions["fill"].outputs[3].postprocess(accepted)
assert slider.visible and slider.value == slider.maximum == len(decoded.marks)
earlier, shades = functions["up_to"].fn(decoded, 1)  # as the slider calls it
assert functions["up_to"].fn(None, 1) is None  # the server has started again
assert (np.asarray(earlier)[2:] == 128).all() and earlier.size == accepted[0].size and not shades
assert gallery == past and past[0][1].endswith("seed 5")
assert len(outputs) == 6  # two decodings and four rows
assert all(one[3] is one[6] is None and not one[7].visible for one in outputs[:-1])
assert 'download="plain-5.png" href="data:image/png' in plain and 'download="eagle1-5.png"' in other
assert all("download" not in one[0] + one[1] for one in outputs[:-1])
opened = functions["first"].fn()  # the picture before the first click
assert "data:image/webp" in opened[0] and sides.examples[0] in opened[4][0][1] and opened is functions["first"].fn()
again = list(function.fn("a red apple", "eagle1", 3.0, 6, past))[-1][5]
assert len(again) == 2 and again[1] == past[0]
pear = list(function.fn("a green pear", "eagle1", 3.0, 6, []))[-1][5][0][0]
demo.with_warnings = lambda model, requested, warn: [replace(one, reading="a green pear") for one in requested]
read = list(function.fn("a red apple", "eagle1", 3.0, 6, []))[-1][5][0][0]
assert read.tobytes() == pear.tobytes() != again[0][0].tobytes()  # the image is that of the reading
try:
    list(function.fn("a red apple", "eagle1", 1e9, 5, []))
except gradio.Error as error:
    assert "guidance is" in str(error)
    print("fills")
sides.close()
