"""The empty page: its frame and its style sheet, for screens of any width and for paper."""

__all__ = ["PAGE", "STYLE"]

STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 60rem; margin: 0 auto;
  padding: 1rem; }
h1 { font-size: 1.6rem; line-height: 1.2; } h2 { font-size: 1.15rem; margin: 2rem 0 .5rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 24rem), 1fr)); gap: 1.5rem;
  margin-top: 1.5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .9rem; }
caption { text-align: left; color: #555; padding-bottom: .3rem; }
th, td { padding: .25rem .5rem; text-align: right; border-bottom: 1px solid #ddd; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } th { font-weight: 600; }
th[scope=col] { white-space: normal; vertical-align: bottom; }
figure { margin: 0; } img { width: 100%; height: auto; } figcaption { color: #333; font-size: .95rem; }
dt { font-weight: 600; float: left; clear: left; margin-right: .6rem; } dd { margin: 0 0 .2rem; }
@media (max-width: 32rem) { table { font-size: .75rem; } th, td { padding: .2rem .3rem; } }
@media print { body { max-width: none; font-size: 11px; padding: 0; } table { font-size: 9px; }
  .figures { grid-template-columns: 1fr 1fr; } figure, .wide { break-inside: avoid; }
  h2 { break-after: avoid; } .wide { overflow: visible; } }
"""
PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
{body}
</main>
</body>
</html>
"""
