"""From CUDA C++ text and LTO-IR to cubins, by the libraries that torch for CUDA 13 installs: no nvcc, no headers.

toolchain.py    NVRTC compiles text to LTO-IR; nvJitLink links LTO-IR to a cubin
cubins.py       linked cubins on disk, so that a new process links nothing
"""
