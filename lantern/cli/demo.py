"""`lantern demo`: a page in the browser on which plain decoding and a method fill their images side by side."""

import argparse
import importlib.util

from lantern.cli.command import DONE, Command, add_engine, add_placement, integer, placement_of
from lantern.core.config import install_hint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("model", nargs="?", default="lantern-emoji", metavar="MODEL", help="name, folder or hub id")
    add("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)")
    add("--port", type=integer(1, 65535), default=7860, help="port (default 7860)")
    add("--open", action="store_true", help="open the page in the browser")
    add_placement(parser)
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model and show the page until SIGINT or SIGTERM. ImportError without gradio."""
    if importlib.util.find_spec("gradio") is None:
        raise ImportError(f"lantern demo needs gradio, which is not installed: {install_hint('demo')}")
    from lantern.generation.demo import SideBySide, build_page, launch_options
    from lantern.models.folder import load_model

    sides = SideBySide(load_model(args.model, **placement_of(args)))
    page = build_page(sides)
    try:
        _, url, _ = page.launch(
            server_name=args.host,
            server_port=args.port,
            inbrowser=args.open,
            prevent_thread_lock=True,
            **launch_options(),
        )
        print(f"lantern demo: {url}", flush=True)
        page.block_thread()
    finally:
        page.close(verbose=False)
        sides.close()
    return DONE


COMMAND = Command("demo", "Show plain decoding and a method side by side in the browser.", add_arguments, run)
