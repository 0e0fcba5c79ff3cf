"""OFU: how busy the tensor cores are, from counters, traces and fleets."""
