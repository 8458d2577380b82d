"""What the GPU kernels share: masks on the device, cache keys, launching and replaying calls."""
