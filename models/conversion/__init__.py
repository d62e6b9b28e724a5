"""Files for programs that run models without torch: ONNX, GGUF."""
