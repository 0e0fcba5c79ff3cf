"""What Prometheus and Grafana need to watch OFU of a fleet: rules, alerts, a dashboard."""
