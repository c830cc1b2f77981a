"""From requests to pictures: generator, progress, comparison, picture files, the diffusers pipeline, tuning.

May import models, methods and everything below them. The command line, training and the evaluation import it.
"""
