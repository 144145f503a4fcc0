"""Kernels of our own for passes on a CPU: C++ that is compiled at first use, and what the runtime calls it by."""
