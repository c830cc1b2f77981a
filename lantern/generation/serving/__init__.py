"""An HTTP server for images: requests in OpenAI's form, batches on one model thread, metrics."""
