"""Hypothesis profiles: `quick` by default; HYPOTHESIS_PROFILE=deep for a thorough run."""

import os

from hypothesis import HealthCheck, settings

SUPPRESSED = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]

settings.register_profile("quick", max_examples=60, deadline=None, suppress_health_check=SUPPRESSED, print_blob=True)
settings.register_profile("deep", max_examples=120, deadline=None, suppress_health_check=SUPPRESSED, print_blob=True)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "quick"))
