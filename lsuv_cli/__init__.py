"""LSUV initialization for ONNX models."""
