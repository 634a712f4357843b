"""``python -m lightning_modelprof`` is the command line."""

import sys

from lightning_modelprof.cli.main import main

sys.exit(main())
