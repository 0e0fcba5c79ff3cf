"""Documents to token rows: order, packing, position, batches."""
