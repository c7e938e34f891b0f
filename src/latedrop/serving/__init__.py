"""A calibrated model as an HTTP service; FastAPI and uvicorn are an extra (`pip install "latedrop[serve]"`).

`bodies` makes rows of bytes and bytes of predictions, `service` gathers requests into batches, predicts and counts
them; `app` speaks HTTP. Anything with `predict(rows)` can be served, if what that gives has `to_dict`. It may import
every room below it, `web` among them.
"""

from latedrop.serving.bodies import Limits, RefusalError
from latedrop.serving.service import Service

__all__ = ["Limits", "RefusalError", "Service"]
