"""The compiled kernel in JAX: a call described in numbers and arrays, which XLA hands to `native/` as they lie."""
