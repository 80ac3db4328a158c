"""The models, gradients and optimizers of a rehearsed rank."""
