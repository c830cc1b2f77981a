"""An HTTP server for pictures: requests in OpenAI's form, batches on one model thread, metrics.

Imported by: lantern.cli.serve.
Imports: lantern.generation, fastapi and prometheus-client (extra `serve`).
"""
