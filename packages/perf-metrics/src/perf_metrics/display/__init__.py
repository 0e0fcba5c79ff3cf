"""How figures become text: formats, columns, tables."""
