"""Files for Prometheus and Grafana; `lightning-megatron dashboards` writes them."""
