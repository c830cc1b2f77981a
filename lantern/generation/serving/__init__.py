"""An HTTP server for images: requests in OpenAI's form, batches on one model thread, metrics.

Imported by: lantern.cli.serve.
Imports: lantern.generation, fastapi and prometheus-client (extra `serve`).
"""
