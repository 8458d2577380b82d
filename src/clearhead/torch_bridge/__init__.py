"""PyTorch's side of a call: autograd, operators, compiling and exporting, torch.func."""
