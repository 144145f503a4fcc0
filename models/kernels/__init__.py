"""Swiftopt's own kernels: C++ for CPUs, Triton for CUDA devices, and their Python bindings."""
