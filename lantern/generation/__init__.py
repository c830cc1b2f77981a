"""From requests to images: generator, choice of the method, comparison, image files, the diffusers pipeline, tuning.

May import models, methods and everything below them. The command line, training and the evaluation import it.
"""
