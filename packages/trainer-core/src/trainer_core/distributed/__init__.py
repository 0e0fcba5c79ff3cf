"""Several devices: ranks, which batches they get, and transforms that divide the model among them."""
