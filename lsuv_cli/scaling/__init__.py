"""LSUV: random weights, stages, sessions, the loop. The only user of onnxruntime."""
