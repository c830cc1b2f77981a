"""Plain decoding as a method, and "auto", which stands for another method. The loop is `lantern.decoding.plain`."""

from lantern.methods.spec import MethodSpec

METHODS = (
    MethodSpec("plain", "one code per pass; the baseline", "plain"),
    # `lantern.generation.generator.choose_method` replaces it
    MethodSpec(
        "auto",
        "the method that `lantern tune` measured as fastest; without its profile a nearly free window or plain",
        "plain",
        page="",
    ),
)
