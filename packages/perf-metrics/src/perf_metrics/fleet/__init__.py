"""OFU of every job of a fleet, out of Prometheus, beside the MFU that the applications report."""
