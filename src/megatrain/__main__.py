"""`python -m megatrain` is the same as `megatrain`."""

import sys

from megatrain.commands.main import main

sys.exit(main())
