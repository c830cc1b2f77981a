"""Shapes of draft trees: static trees by name, and dynamic trees grown from candidates."""
