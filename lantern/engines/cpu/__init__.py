"""The C++ engine for CPUs. Its library is built on the user's machine."""
