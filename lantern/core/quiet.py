"""Loading by transformers without its progress bars and warnings."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress transformers' progress bars, its messages below errors, and warnings."""
    from transformers import logging

    had_bars, level = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(level)
        if had_bars:
            logging.enable_progress_bar()
