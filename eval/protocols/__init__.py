"""Protocols of published evaluations: prompts, generation, manifests, Ray jobs and their reproduction.

Imported by `cli` and by the other folders of `lantern.eval`.
Imports `core`, `models`, `methods`, `generation` and the other folders of `lantern.eval`.
"""
