"""A page of HTML that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_STYLE = """
body { margin: 0 auto; padding: 24px; max-width: 1080px; color: #1f2328;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 26px; }
h2 { font-size: 19px; margin: 32px 0 8px; }
table { border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 14px 4px 0; border-bottom: 1px solid #d9dce0; text-align: left; vertical-align: top; }
pre { padding: 10px 14px; border: 1px solid #d9dce0; border-radius: 8px; white-space: pre-wrap; }
.wide { overflow-x: auto; }
svg { max-width: 100%; height: auto; }
"""


def page(title: str, body: str) -> str:
    """Return a document with a title; its policy lets it ask no other host for anything."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
        '<meta name="viewport" content="width=device-width">\n<link rel="icon" href="data:,">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def section(title: str, content: str) -> str:
    """Return content, which is HTML, under a heading, which is text."""
    return f'<h2>{escape(title)}</h2>\n<div class="wide">{content}</div>'


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a table of texts; a header of empty texts is left out."""
    heads = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "\n".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
    head = f"<thead><tr>{heads}</tr></thead>" if any(header) else ""
    return f"<table>{head}<tbody>\n{body}\n</tbody></table>"


def preformatted(text: str) -> str:
    """Return text whose lines stay as they are."""
    return f"<pre>{escape(text)}</pre>"
