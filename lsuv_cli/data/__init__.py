"""The user's data as batches that fit a model's inputs. Knows nothing of ONNX graphs."""
