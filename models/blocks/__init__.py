"""What may be done to blocks as they train: recomputation, offload, fp8, gradients of weights put off."""
