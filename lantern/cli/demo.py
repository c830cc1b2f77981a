"""`lantern demo`: a page in the browser on which plain decoding and a method fill their images side by side."""

import argparse
import importlib.util

from lantern.cli.command import DONE, Command, add_engine, dtype_of, dtype_of_names, engine_of, integer
from lantern.core.config import install_hint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("model", nargs="?", default="lantern-emoji", metavar="MODEL", help="name, folder or hub id")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine only)"
    )
    parser.add_argument("--port", type=integer(1, 65535), default=7860, help="port (default 7860)")
    parser.add_argument("--open", action="store_true", help="open the page in the browser")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, cuda:N or mps")
    parser.add_argument("--dtype", type=dtype_of_names("auto"), default="auto", help="auto: fp32 on a CPU, else bf16")
    add_engine(parser)


def run(args: argparse.Namespace) -> int:
    """Load the model and show the page until SIGINT or SIGTERM."""
    if importlib.util.find_spec("gradio") is None:
        raise ImportError(f"lantern demo needs gradio, which is not installed: {install_hint('demo')}")
    from lantern.generation.demo import SideBySide, build_page, launch_options
    from lantern.models.folder import load_model

    model = load_model(
        args.model, device=args.device, dtype=dtype_of(args.dtype, args.target_weights), engine=engine_of(args)
    )
    sides = SideBySide(model)
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
