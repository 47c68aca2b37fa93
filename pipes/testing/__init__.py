"""The laws of pipelines as functions, and Hypothesis strategies, for your own stages and pipelines as for ours.

>>> from pipes import batch
>>> check_stage(batch(2), [1, None, 3])
"""

from pipes.testing.laws import LawError, check_pipeline, check_stage
from pipes.testing.strategies import pipelines, stages

__all__ = ["LawError", "check_pipeline", "check_stage", "pipelines", "stages"]
