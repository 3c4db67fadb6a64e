"""`python -m jax_webgpu`."""

import sys

from jax_webgpu.cli import main

sys.exit(main())
