"""From requests to images: generator, progress, comparison, image files, the diffusers pipeline, tuning.

May import models, methods and everything below them. The command line, training and the evaluation import it.
"""
