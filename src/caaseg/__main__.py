"""`python -m caaseg` is the command `caaseg`."""

import sys

from caaseg.cli import main

sys.exit(main())
