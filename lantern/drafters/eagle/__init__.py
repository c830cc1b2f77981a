"""EAGLE drafters: versions 1 to 3, PosS, ViSpec, FR-Spec, and their static and dynamic trees."""
