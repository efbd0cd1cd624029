"""PyTorch-side checkpoints to parameters and back, tensor by tensor.

readers, gguf_file: files to named tensors. configs: their metadata to ModelConfig and
DrafterConfig. layouts: tensor names to parameter paths. checkpoint: what others call.
"""
