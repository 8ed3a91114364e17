"""Facts about kernels: keys, configs, the manifest, tiles, and the kernels of this installation."""
