"""The kernels: each takes a problem or says why it does not. They never import one another."""
