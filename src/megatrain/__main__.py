"""`python -m megatrain` is the same as `megatrain`."""

import sys

from megatrain.cli import main

sys.exit(main())
