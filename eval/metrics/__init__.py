"""Quality metrics: FID, KID, CLIP score, preference and perceptual distances, with their networks.

Imported by `cli` and by the other folders of `lantern.eval`.
Imports `core`, `models`, `generation` and `eval.speed.surroundings`.
"""
