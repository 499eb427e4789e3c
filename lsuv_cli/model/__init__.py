"""An ONNX model: read, understood, changed, written. Runs no sessions and knows nothing of the user's data."""
