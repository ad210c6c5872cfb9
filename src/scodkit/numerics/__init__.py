"""What knows no networks: products in mixed precision, kernels, files and what they hold."""
