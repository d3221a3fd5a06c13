"""Hold a model on its device: the store's tensors, gradients to a staging buffer, parameters back."""
