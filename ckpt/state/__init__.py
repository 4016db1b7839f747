"""One way to describe a state: modules, optimizers, objects, tensors and values, as pieces."""
