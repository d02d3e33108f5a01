"""The launcher's worker for a run that is stopped most of the time -> the same, at the pace of one that is not.

A recorder writes its spans once a second, by a clock that goes on while the process is stopped: it would write them
several times as often, in proportion to what it computes.
"""

import os

from bench.turns import AT_ONCE
from engine.real import recorder
from engine.real.worker import work as work

recorder.WINDOW *= int(os.environ[AT_ONCE])
