"""Programs of our own for CPUs, in C++, built on the user's machine at first use."""
