"""Every interpreter of a survey finds `vllm` here: see stand_in.py."""

import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "support"))
from vllm_survey import stand_in

stand_in.install()
