"""The page at `/docs`: what the service answers, from its OpenAPI description. It loads nothing, and runs no script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from html import escape
from typing import Any

__all__ = ["POLICY", "docs_page"]

POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
"""What a browser may load for it."""
_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
code, pre { font: 14px/1.5 ui-monospace, monospace; }
pre { overflow-x: auto; padding: .8rem 1rem; border: 1px solid #8886; border-radius: 8px; }
h2 { margin-top: 2.4rem; }
table { border-collapse: collapse; }
td { padding: .2rem 1.4rem .2rem 0; vertical-align: top; }
"""


def docs_page(described: Mapping[str, Any], token: bool) -> str:
    """HTML for an OpenAPI description; `token` says whether requests need one."""
    title = escape(described["info"]["title"])
    parts = [
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{title}</title>"
        f"<meta name='viewport' content='width=device-width, initial-scale=1'><style>{_STYLE}</style></head><body>",
        f"<h1>{title}</h1><p>What this service answers. The same for programs: "
        "<a href='openapi.json'>openapi.json</a>.</p>",
    ]
    for path, methods in described["paths"].items():
        for method, about in methods.items():
            parts += _path(path, method.upper(), about, token)
    return "\n".join([*parts, "</body></html>"])


def _path(path: str, method: str, about: Mapping[str, Any], token: bool) -> list[str]:
    found = [f"<h2><code>{method} {escape(path)}</code></h2><p>{escape(about.get('summary', ''))}.</p>"]
    bodies = about.get("requestBody", {}).get("content", {})
    lines = [f"curl http://HOST{path}"]
    lines += ["-H 'Authorization: Bearer TOKEN'"] if token and path != "/healthz" else []
    example = next((body["schema"]["example"] for body in bodies.values() if "example" in body.get("schema", {})), None)
    if example is not None:
        lines += ["-H 'Content-Type: application/json'", f"-d '{json.dumps(example)}'"]
    if bodies:
        found.append(f"<p>Body: {', '.join(f'<code>{escape(kind)}</code>' for kind in bodies)}.</p>")
    for body in bodies.values():
        found.append(_table(body.get("schema", {}).get("properties", {}), "description", "type"))
    found.append(f"<pre>{escape(' '.join(lines))}</pre>")
    return [*found, _table(about.get("responses", {}), "description")]


def _table(rows: Mapping[str, Mapping[str, Any]], *names: str) -> str:
    if not rows:
        return ""
    cells = [
        f"<tr><td><code>{escape(str(key))}</code></td><td>{escape(next((str(row[n]) for n in names if n in row), ''))}"
        "</td></tr>"
        for key, row in rows.items()
    ]
    return f"<table>{''.join(cells)}</table>"
