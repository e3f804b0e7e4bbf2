"""What every test shares."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

# A shell that runs this in the background has SIGINT ignored, and children inherit that: the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# A report takes seconds at the end of every run; its own tests ask for it.
os.environ.setdefault("RLINF_REPORT", "0")

# The commit run is short and repeatable; `make nightly` picks the long one with --hypothesis-profile=nightly.
settings.register_profile(
    "commit", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("nightly", max_examples=1000, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("commit")
