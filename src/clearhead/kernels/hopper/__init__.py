"""Hopper's own kernels, in Gluon: what the copy engine and asynchronous matrix products make possible there."""
