"""`sw.autotune`: the persistent, device-aware autotuner for Triton kernels of others."""
