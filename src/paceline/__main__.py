"""`python -m paceline` is the command line."""

import sys

from paceline.cli import main

sys.exit(main())
