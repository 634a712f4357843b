"""``python -m lightning_modelprof`` is the command line."""

import sys

from lightning_modelprof.cli import main

sys.exit(main())
