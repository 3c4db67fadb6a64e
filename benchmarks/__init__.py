"""What everything is measured with: `./dev bench`."""

import os

# JAX's CUDA platform would take three quarters of the memory that WebGPU needs too.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
