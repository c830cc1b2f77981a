"""`lantern demo`: a page in the browser on which plain decoding and a method fill their images side by side."""

import importlib.util
from typing import TYPE_CHECKING

from lantern.cli.command import arg, command, opt
from lantern.cli.options import MODEL, MODEL_HELP, Placement
from lantern.core.config import install_hint

if TYPE_CHECKING:
    from lantern.core.process import Stopping


def demo(
    model: str = arg(MODEL_HELP, default=MODEL),
    host: str = opt("127.0.0.1", "address to listen on (default 127.0.0.1: this machine only)"),
    port: int = opt(7860, "port", 1, 65535),
    open: bool = opt(False, "open the page in the browser"),
    *,
    where: Placement,
    stopping: "Stopping",
) -> None:
    """Show plain decoding and a method side by side in the browser."""
    if importlib.util.find_spec("gradio") is None:
        raise ImportError(f"lantern demo needs gradio, which is not installed: {install_hint('demo')}")
    from lantern.generation.demo import SideBySide, build_page, launch_options
    from lantern.models.folder import load_model

    sides = SideBySide(load_model(model, **where.options()))
    page = build_page(sides)
    how = {"server_name": host, "server_port": port, "inbrowser": open, "prevent_thread_lock": True}
    try:
        try:
            _, url, _ = page.launch(**how, **launch_options())
        except OSError as error:
            raise OSError(f"cannot listen at {host}:{port}: choose another --host or --port") from error
        print(f"lantern demo: {url}", flush=True)
        page.block_thread()
        stopping.check()  # gradio swallows the exception of a signal
    finally:
        page.close(verbose=False)
        sides.close()


COMMAND = command(demo)
