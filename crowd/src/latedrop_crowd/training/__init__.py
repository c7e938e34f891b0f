"""Training MCNN on annotated frames: settings, batches, the loop with its checkpoints, and the log beside the weights.

The averaged weights at the end of the last epoch are kept. To choose an epoch by validation frames would be to choose
noise: these frames follow one another, and are worth a few independent ones. Validation frames are cut from the
training frames, and test frames are looked at once, at the end.
"""

from latedrop_crowd.training.loop import Settings
from latedrop_crowd.training.network import (
    RECOMMENDED,
    cross_fit,
    evaluate_counts,
    predict_counts,
    read_log,
    summary,
    train,
)

__all__ = ["RECOMMENDED", "Settings", "cross_fit", "evaluate_counts", "predict_counts", "read_log", "summary", "train"]
