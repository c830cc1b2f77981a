"""Plain decoding as a method. Its loop is `lantern.decoding.plain`."""

from lantern.methods.spec import MethodSpec

METHODS = (MethodSpec("plain", "one code per pass; the baseline", "plain"),)
