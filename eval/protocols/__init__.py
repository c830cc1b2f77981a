"""Protocols of published evaluations: prompts, generation, manifests, Ray jobs and their reproduction."""
