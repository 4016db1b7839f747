"""Tensors that are one on one side and several, or a transpose, on the other: `stacks=`."""
