"""Where the bindings look for NVRTC and nvJitLink, apart from site-packages, which Bazel does not have."""

import os

import nvidia.cu13

os.environ["CUDA_PATH"] = nvidia.cu13.__path__[0]
