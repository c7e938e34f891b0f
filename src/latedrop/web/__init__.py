"""Local pages over HTTP: who may ask, what a page may load, and where it is served. FastAPI and uvicorn are extras."""
