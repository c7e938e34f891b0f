"""A calibrated model as an HTTP service; FastAPI and uvicorn are an extra (`pip install "latedrop[serve]"`).

`limits` says what is too much, `bodies` makes rows of a request's bytes, `batching` gathers requests into batches,
`service` predicts them, `answers` makes bytes of predictions, `counts` is for Prometheus; `app` speaks HTTP, `server`
listens. Anything with `predict(rows)` can be served, if what that gives has `to_dict`.
"""

from latedrop.serving.limits import Limits, RefusalError
from latedrop.serving.service import Service

__all__ = ["Limits", "RefusalError", "Service"]
