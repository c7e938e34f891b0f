"""Training MCNN on annotated frames: settings, batches, the loop with its checkpoints, counts, the log."""

from latedrop.crowd.training.checkpoint import Checkpoint, Fit, differences
from latedrop.crowd.training.counts import evaluate_counts, predict_counts
from latedrop.crowd.training.log import SCHEMA, add_test, read_logs, said, table, update_page
from latedrop.crowd.training.loop import fit
from latedrop.crowd.training.network import SETS, Request, run, test, train
from latedrop.crowd.training.settings import RECOMMENDED, Settings

__all__ = [
    "RECOMMENDED",
    "SCHEMA",
    "SETS",
    "Checkpoint",
    "Fit",
    "Request",
    "Settings",
    "add_test",
    "differences",
    "evaluate_counts",
    "fit",
    "predict_counts",
    "read_logs",
    "run",
    "said",
    "table",
    "test",
    "train",
    "update_page",
]
