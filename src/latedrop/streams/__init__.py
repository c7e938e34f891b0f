"""Data that change: intervals that follow the errors of a stream, and alarms where it is no longer as it was.

A `Stream` needs numbers alone, a prediction with an interval and now and then a label; it knows nothing of models.

It may import `data` and `metrics`.
"""

from latedrop.streams.monitor import Alarm
from latedrop.streams.stream import Stream, StreamPrediction

__all__ = ["Alarm", "Stream", "StreamPrediction"]
